"""Jumps over tokens that a grammar forces change no token and no text: an answer only takes fewer steps.

Requests with log-probabilities never jump, since these need the logits of each position.  So the same request with
`logprobs=0` is the reference: its tokens are sampled one by one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quire.engine.commands import Resume
from quire.engine.config import EngineConfig
from quire.engine.core.policy.jumps import JumpCosts
from quire.engine.executor import followers, grammars
from quire.engine.executor.base import ScriptedExecutor
from quire.engine.executor.grammars import Grammars
from quire.engine.llm import LLM, Completion, Output
from quire.engine.wire.messages import FOREVER_MS, Generate, Sampling
from tests.checkpoints import VOCAB, tokenizer
from tests.executor.driver import fail_next_step
from tests.executor.matchers import EOS, PROMPT, begin, four_slots, regex, schema
from tests.matrix import each_value, examples
from tests.schemas import kinds, samplings


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


ORDER = record(
    identification_number={"type": "integer", "minimum": 0, "maximum": 99},
    delivery_address=record(street_and_house={"type": "string", "maxLength": 4}, is_a_business={"type": "boolean"}),
    payment_method={"enum": ["invoice by mail", "invoice by letter", "credit card"]},
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "record": ORDER,
    "list": {"type": "array", "items": record(temperature_c={"enum": [20, 21]}), "minItems": 2, "maxItems": 3},
    "constant": {"const": {"a constant": ["that", "is", "forced", "from its", "beginning to its end"]}},
    "union": {"anyOf": [record(first_kind={"const": "one"}), record(second_kind={"const": "two"})]},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 11},
    "hot": {"seed": 12, "temperature": 2.0, "top_k": 40, "top_p": 0.9},
    "penalties": {"seed": 13, "presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
    "min_tokens": {"seed": 14, "min_tokens": 30},
    "bias": {"seed": 15, "logit_bias": [(EOS, 50.0), (80, -100.0)]},
}


@pytest.fixture(scope="module", autouse=True)
def jumps_pay() -> Iterator[None]:
    """Whatever they cost on this machine: every jump that is possible is taken."""
    with mock.patch.object(JumpCosts, "pay", return_value=True):
        yield


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    made = LLM(
        str(checkpoint("llama")), dtype="float32", kv_blocks=256, threads=1, poison_free_blocks=True, drafts="off"
    )
    yield made
    made.close()


def asked(grammar: str, **how: Any) -> Sampling:
    return Sampling(**({"seed": 3} | how), grammar=grammar)


def step_by_step(sampling: Sampling) -> Sampling:
    """The same request, which may not jump."""
    return msgspec.structs.replace(sampling, logprobs=max(0, sampling.logprobs))


class Run:
    """The answers to one prompt, and what they took."""

    def __init__(self, llm: LLM, sampling: Sampling, *, limit: int = 300, n: int = 1) -> None:
        totals, before = llm.engine.core.report.totals, llm.engine.core.step
        jumped = totals.jumped_tokens
        [completion] = llm.generate([PROMPT], sampling, max_new_tokens=limit, n=n)
        self.outputs = completion.outputs
        self.steps, self.jumped = llm.engine.core.step - before, totals.jumped_tokens - jumped

    @property
    def answers(self) -> list[tuple[list[int], str, str | None, str]]:
        return [(one.token_ids, one.text, one.finish_reason, one.message) for one in self.outputs]


def both(llm: LLM, sampling: Sampling, *, limit: int = 300, n: int = 1) -> tuple[Run, Run]:
    """(with jumps, without)."""
    return Run(llm, sampling, limit=limit, n=n), Run(llm, step_by_step(sampling), limit=limit, n=n)


# ---------------------------------------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize(("name", "how"), each_value(list(SCHEMAS), list(WAYS)))
def test_jumps_change_no_token(llm: LLM, name: str, how: str) -> None:
    jumping, plain = both(llm, asked(schema(SCHEMAS[name]), **WAYS[how]))
    assert jumping.answers == plain.answers
    assert jumping.outputs[0].finish_reason == "stop", jumping.outputs[0].message
    jsonschema.validate(json.loads(jumping.outputs[0].text), SCHEMAS[name])
    assert plain.jumped == 0
    assert jumping.jumped > 0
    assert plain.steps == len(plain.outputs[0].token_ids)
    assert jumping.steps < plain.steps


@pytest.mark.parametrize("name", SCHEMAS)
def test_plans_that_do_not_look_ahead_change_no_token(llm: LLM, name: str) -> None:
    """Some tokens that a grammar forces at the start or behind a plan without a search are found by a later one."""
    jumping, plain = both(llm, asked(schema(SCHEMAS[name])))
    with mock.patch.object(JumpCosts, "look_ahead", return_value=False):
        blind, _ = both(llm, asked(schema(SCHEMAS[name])))
    rng = random.Random(name)
    with mock.patch.object(JumpCosts, "look_ahead", side_effect=lambda *_: rng.random() < 0.4):
        sometimes = [Run(llm, asked(schema(SCHEMAS[name]))) for _ in range(4)]
    assert blind.jumped == 0
    assert blind.answers == plain.answers
    assert blind.steps == plain.steps
    assert all(one.answers == plain.answers for one in sometimes)
    assert 0 < sum(one.jumped for one in sometimes) < 4 * jumping.jumped


# Shrinking would take minutes.
@settings(max_examples=examples(40), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.tuples(kinds(), samplings()), min_size=1, max_size=5))
def test_random_schemas_in_a_batch(llm: LLM, wanted: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    jumping = [Sampling(**(how | {"logprobs": -1}), grammar=schema(what)) for what, how in wanted]
    plain = [step_by_step(one) for one in jumping]
    found = llm.generate([PROMPT] * 2 * len(wanted), jumping + plain, max_new_tokens=80)
    for one, other in zip(found, found[len(wanted) :], strict=False):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason


def test_an_answer_takes_fewer_steps_than_tokens(llm: LLM) -> None:
    """A schema with long fixed keys: most of the answer is forced."""
    run = Run(llm, asked(schema(ORDER)))
    tokens = len(run.outputs[0].token_ids)
    assert run.jumped > tokens / 3
    assert run.steps <= tokens - run.jumped


def test_an_answer_that_is_forced_as_a_whole_takes_one_step(llm: LLM) -> None:
    """The prompt's step samples its first token, which forces all others and the end."""
    run = Run(llm, asked(regex("exactly this and nothing else")))
    assert run.outputs[0].text == "exactly this and nothing else"
    assert run.outputs[0].token_ids[-1] == EOS
    assert run.steps == 1


def test_long_runs_are_taken_in_parts(llm: LLM) -> None:
    text = "".join(chr(97 + (at * at + at // 7) % 26) for at in range(200))
    jumping, plain = both(llm, asked(regex(text)))
    assert jumping.answers == plain.answers
    assert jumping.outputs[0].text == text
    assert 1 < jumping.steps < len(jumping.outputs[0].token_ids) / 5


def test_siblings_jump_each_by_itself(llm: LLM) -> None:
    jumping, plain = both(llm, asked(schema(ORDER), seed=8), n=3)
    assert jumping.answers == plain.answers
    assert len({output.text for output in jumping.outputs}) > 1
    assert jumping.jumped > 0


def test_max_tokens_ends_an_answer_anywhere(llm: LLM) -> None:
    whole = Run(llm, asked(schema(ORDER))).outputs[0].token_ids
    for limit in range(1, len(whole) + 1):
        [output] = Run(llm, asked(schema(ORDER)), limit=limit).outputs
        assert output.token_ids == whole[:limit]
        assert output.finish_reason == ("stop" if limit == len(whole) else "length")


def test_a_stop_token_ends_an_answer_among_forced_tokens(llm: LLM) -> None:
    whole = Run(llm, asked(schema(ORDER))).outputs[0].token_ids
    for stop in sorted(set(whole)):
        [output] = Run(llm, asked(schema(ORDER), stop_token_ids=[stop])).outputs
        assert output.token_ids == whole[: whole.index(stop) + 1]
        assert output.finish_reason == "stop"


def test_other_requests_in_the_batch_are_as_ever(llm: LLM) -> None:
    free = Sampling(seed=5)
    [alone] = llm.generate([PROMPT], free, max_new_tokens=40)
    mixed = llm.generate([PROMPT] * 3, [free, asked(schema(ORDER)), asked(schema(SCHEMAS["list"]))], max_new_tokens=40)
    assert mixed[0].outputs[0].token_ids == alone.outputs[0].token_ids


# ------------------------------------------------------------------------------------------- what must not be jumped


@pytest.mark.parametrize("field", ["bad_words", "allowed_token_ids", "logit_bias"])
def test_a_forced_token_that_another_setting_forbids_is_not_jumped(llm: LLM, field: str) -> None:
    """The request ends with an error at that token, as it does without jumps."""
    grammar = schema(ORDER)
    whole = Run(llm, asked(grammar)).outputs[0].token_ids
    found = four_slots(Path(llm.config.model))
    at = next(at for at in range(1, len(whole)) if len(forced_behind(found, grammar, whole[:at])) > 3)
    forbidden = whole[at + 2]
    fields: dict[str, dict[str, Any]] = {
        "bad_words": {"bad_words": [whole[at : at + 3]]},
        "allowed_token_ids": {"allowed_token_ids": [token for token in range(VOCAB) if token != forbidden]},
        "logit_bias": {"logit_bias": [(forbidden, -math.inf)]},
    }
    jumping, plain = both(llm, asked(grammar, **fields[field]))
    assert jumping.answers == plain.answers
    assert jumping.outputs[0].finish_reason == "error"
    assert "no token is possible" in jumping.outputs[0].message
    assert jumping.jumped == 0


# ------------------------------------------------------------------------------------------ preempted, failed, resumed


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_preempted_answers_are_the_same(llm: LLM, checkpoint: Callable[[str], Path], preempt: str) -> None:
    wanted = [asked(schema(SCHEMAS[name]), seed=seed) for seed in range(5) for name in ("record", "list")]
    expected = llm.generate([PROMPT] * 10, [step_by_step(one) for one in wanted], max_new_tokens=120)
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "block_size": 8, "max_model_len": 192}
    tight = LLM(
        str(checkpoint("llama")),
        **options,
        kv_blocks=24,
        admission="threshold",
        admit_threshold=1.0,
        preempt=preempt,
        swap_memory_gib=0.01,
    )
    found = tight.generate([PROMPT] * 10, wanted, max_new_tokens=120)
    totals = tight.engine.core.report.totals
    tight.close()
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert totals.preemptions
    assert totals.jumped_tokens
    assert bool(totals.swap_preemptions) == (preempt == "swap")


def test_a_failed_step_changes_no_token(llm: LLM) -> None:
    """The executor forgets every matcher; the scheduler has the forced tokens."""
    expected = Run(llm, asked(schema(ORDER))).outputs[0].token_ids
    for steps in range(1, 8):
        again = llm.submit(PROMPT, asked(schema(ORDER)), max_new_tokens=300)
        for _ in range(steps):
            llm.step()
        fail_next_step(llm)
        while llm.unfinished:
            llm.step()
        assert again.outputs[0].token_ids == expected


def test_an_answer_resumes_anywhere_in_a_forced_run(llm: LLM) -> None:
    """Another engine has emitted the first tokens.  This one jumps over the rest of the run, too."""
    grammar = regex("(yes|no), and this is what follows[.!]")
    whole = Run(llm, asked(grammar)).outputs[0].token_ids
    for count in range(1, len(whole)):
        request = Generate(f"resumed-{count}", "", PROMPT, 300, asked(grammar), FOREVER_MS)
        completion = llm.unfinished[request.id] = Completion(PROMPT, [Output(token_ids=whole[:count])])
        llm._open_outputs[request.id] = 1
        llm._box.commands.append(Resume(request, [whole[:count]]))
        before = llm.engine.core.step
        while llm.unfinished:
            llm.step()
        assert completion.outputs[0].token_ids == whole
        assert llm.engine.core.step - before <= 4


# --------------------------------------------------------------------------------------------------- masks, matchers


def take(found: Grammars, slot: int, token: int) -> list[int]:
    """Let a slot sample a token.  Returns what is reported as forced behind it."""
    at = found.followers([slot])
    followers.advance(at, [token])
    return followers.forced_tokens(at).get(slot, [])


def forced_behind(found: Grammars, grammar: str, emitted: list[int]) -> list[int]:
    """What is reported as forced with the last of these tokens."""
    begin(found, 0, grammar, emitted[:-1])
    return take(found, 0, emitted[-1])


def allowed(found: Grammars, slot: int) -> list[int]:
    found.fill()
    bits: list[int] = np.unpackbits(found.mask[slot].view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return bits


@settings(max_examples=examples(40))
@given(kinds(), st.integers(0, 2**32))
def test_forced_tokens_are_those_that_the_masks_allow(
    checkpoint: Callable[[str], Path], what: dict[str, Any], seed: int
) -> None:
    """Slot 0 knows of forced tokens, slot 1 does not, slot 2 is given all tokens at once at each of them."""
    found = four_slots(checkpoint("llama"))
    grammar, rng = schema(what), random.Random(seed)
    begin(found, 0, grammar, [])
    begin(found, 1, grammar, [], logprobs=0)
    tokens, forced = list[int](), list[int]()
    while len(tokens) < 60 and tokens[-1:] != [EOS]:
        begin(found, 2, grammar, tokens)
        choices = allowed(found, 1)
        assert allowed(found, 0) == allowed(found, 2) == choices
        assert choices == forced[:1] or not forced
        tokens.append(rng.choice(choices))
        more = take(found, 0, tokens[-1])
        assert take(found, 1, tokens[-1]) == []
        assert not (forced[1:] and more), "reported twice"
        forced = more or forced[1:]


def test_finding_forced_tokens_is_bounded_work(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long run a part is found at a time, at least one token."""
    found = four_slots(checkpoint("llama"))
    grammar = regex("(a|b)cdefghijklmnopq(r|s)")
    whole = forced_behind(found, grammar, first := tokenizer().encode("a", add_special_tokens=False))
    for most in (1, len(whole) + 1, 3 * len(whole)):
        monkeypatch.setattr(grammars, "MAX_FOUND", most)
        run, sampled = list[int](), first[0]
        begin(found, 0, grammar, [])
        found.fill()
        while forced := take(found, 0, sampled):
            assert sum(len(whole) - len(run) - at for at in range(len(forced) - 1)) < most
            run += forced
            for token in forced[:-1]:
                assert take(found, 0, token) == []
            sampled = forced[-1]
        assert run == whole


def test_a_jump_keeps_its_matcher_and_steps_in_flight_tell_of_no_token(checkpoint: Callable[[str], Path]) -> None:
    """As on a GPU: the slot jumps while a step is in flight that samples the first forced token."""
    found = four_slots(checkpoint("llama"))
    grammar = regex("(a|b)cdefg(h|i)")
    begin(found, 0, grammar, [])
    first = allowed(found, 0)[0]
    forced = take(found, 0, first)
    assert len(forced) > 2
    matcher = found._rows[0].matcher
    in_flight = found.followers([0])
    assert allowed(found, 0) == forced[:1]
    begin(found, 0, grammar, [first, *forced])
    assert found._rows[0].matcher is matcher
    assert followers.advance(in_flight, forced[:1]) == {}
    assert followers.forced_tokens(in_flight) == {}
    assert len(allowed(found, 0)) > 1
    begin(found, 0, grammar, [first, *forced[:2]])  # a shorter jump than the one before cannot use the matcher
    assert found._rows[0].matcher is not matcher
    assert allowed(found, 0) == forced[2:3]


def test_a_jump_over_a_part_of_a_run_is_followed_by_the_rest(checkpoint: Callable[[str], Path]) -> None:
    found = four_slots(checkpoint("llama"))
    grammar = regex("(a|b)cdefg(h|i)")
    begin(found, 0, grammar, [])
    first = allowed(found, 0)[0]
    forced = take(found, 0, first)
    matcher = found._rows[0].matcher
    begin(found, 0, grammar, [first, *forced[:2]])
    assert found._rows[0].matcher is matcher
    for token in forced[2:]:
        assert allowed(found, 0) == [token]
        assert take(found, 0, token) == []
    assert len(allowed(found, 0)) > 1


def test_with_several_end_tokens_the_end_is_not_forced(checkpoint: Callable[[str], Path]) -> None:
    found = four_slots(checkpoint("llama"), eos=[EOS, 2])
    grammar = regex("(a|b)cd")
    begin(found, 0, grammar, [])
    for token in [first := allowed(found, 0)[0], *take(found, 0, first)]:
        if token != first:
            take(found, 0, token)
    assert allowed(found, 0) == sorted([EOS, 2])


# ---------------------------------------------------------------------------------------------------------- elsewhere


def test_the_scripted_executor_jumps_with_two_steps_in_flight(checkpoint: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), executor="scripted", kv_blocks=64)
    llm = LLM.over(config, ScriptedExecutor.load(config), tokenizer())
    eos = llm.executor.info.eos_ids[0]
    for seed in range(4):
        jumping, plain = both(llm, asked(schema(ORDER), seed=seed))
        assert jumping.answers == plain.answers
        assert jumping.outputs[0].token_ids[-1] == eos
        assert jumping.steps < plain.steps
        assert jumping.jumped > 0


@pytest.mark.gpu
def test_jumps_on_a_gpu(checkpoint: Callable[[str], Path]) -> None:
    """Step N+1 is in flight when result N names forced tokens.  Logits depend on the rows of a step there.

    So answers are compared with their schemas, and those that are forced completely are compared exactly.  These end
    with their first token: nothing is left to compute."""
    llm = LLM(str(checkpoint("llama")), device="cuda", dtype="bfloat16", kv_blocks=256)
    jumping, plain = both(llm, asked(regex("(a|b)nd this is what follows it to the end")))
    assert jumping.answers == plain.answers
    assert jumping.steps < plain.steps
    wanted = [asked(schema(SCHEMAS[name]), seed=seed) for seed in range(8) for name in SCHEMAS]
    found = llm.generate([PROMPT] * len(wanted), wanted, max_new_tokens=300)
    totals = llm.engine.core.report.totals
    llm.close()
    finished = 0
    for at, one in enumerate(found):
        [output] = one.outputs
        assert output.finish_reason in ("stop", "length"), output.message  # spaces may take all of max_new_tokens
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), list(SCHEMAS.values())[at % len(SCHEMAS)])
            finished += 1
    assert finished > len(found) / 2
    assert 0 < totals.jumped_tokens < totals.forced_tokens
