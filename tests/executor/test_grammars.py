"""Answers follow their grammar in every way of sampling, and a grammar's state is a function of the tokens."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from quire.engine.config import EngineConfig
from quire.engine.executor import followers
from quire.engine.executor.base import ScriptedExecutor, scripted_token
from quire.engine.executor.grammars import FAILED, FAULTY, THREADED, Grammars
from quire.engine.executor.local import LocalExecutor
from quire.engine.executor.worker import Launched, Pending
from quire.engine.llm import LLM, Completion, Output
from quire.engine.wire.messages import Sampling
from quire.service.grammar.grammar import Constraint, compile_grammar
from tests.checkpoints import VOCAB, tokenizer
from tests.executor.driver import Driver, fail_next_step
from tests.executor.matchers import EOS, PERSON, PROMPT, begin, choice, four_slots, regex, schema
from tests.matrix import examples
from tests.pace import patience
from tests.schemas import kinds, samplings

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def llm(checkpoint: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[LLM]:
    """On a GPU a step's model is launched before the tokens of the step before it are known."""
    dtype = {"cpu": "float32", "cuda": "bfloat16"}[request.param]
    made = LLM(
        str(checkpoint("llama")), device=request.param, dtype=dtype, kv_blocks=256, threads=1, poison_free_blocks=True
    )
    yield made
    made.close()


def answers(llm: LLM, grammar: str, *, limit: int = 400, n: int = 1, **sampling: Any) -> Completion:
    asked = Sampling(**({"seed": 3} | sampling), grammar=grammar)
    [found] = llm.generate([PROMPT], asked, max_new_tokens=limit, n=n)
    return found


def assert_same(llm: LLM, found: Output, expected: Output) -> None:
    """The same tokens; on a GPU the first few of them, because logits depend there on how many rows a step has."""
    assert isinstance(llm.executor, LocalExecutor)
    count = 8 if llm.executor.depth > 1 else None
    assert found.token_ids[:count] == expected.token_ids[:count]


# ------------------------------------------------------------------------------------------------- answers follow


# Shrinking would take minutes.
@settings(max_examples=examples(60), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.tuples(kinds(), samplings()), min_size=1, max_size=6))
def test_every_finished_answer_is_valid(llm: LLM, wanted: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Random schemas and settings on random weights, several in a batch."""
    asked = [Sampling(**how, grammar=schema(what)) for what, how in wanted]
    finished = 0
    for (what, _), completion in zip(
        wanted, llm.generate([PROMPT] * len(asked), asked, max_new_tokens=300), strict=True
    ):
        [output] = completion.outputs
        assert output.finish_reason in ("stop", "length"), output.message
        if output.finish_reason == "stop":
            assert output.token_ids[-1] == EOS
            jsonschema.validate(json.loads(output.text), what)
            finished += 1
        else:  # spaces between the parts are bounded, but a model may want all of them
            assert len(output.token_ids) == 300
    event(f"{finished} of {len(wanted)} finished")


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 2}])
def test_each_form_of_grammar(llm: LLM, sampling: dict[str, Any]) -> None:
    assert answers(llm, choice("yes", "no", "maybe \u2603"), **sampling).outputs[0].text in (
        "yes",
        "no",
        "maybe \u2603",
    )
    found = answers(llm, regex(r"[a-c]{2,5}[0-9]{3}"), **sampling).outputs[0]
    assert len(found.text) in range(5, 9)
    assert found.finish_reason == "stop"
    lark = 'start: greeting " " name "!"\ngreeting: "hi" | "hello"\nname: /[A-Z][a-z]{1,4}/'
    text = answers(llm, compile_grammar(Constraint("grammar", "grammar", lark)).grammar, **sampling).outputs[0].text
    assert text.startswith(("hi ", "hello "))
    assert text.endswith("!")


def test_blanks_are_bounded(llm: LLM) -> None:
    """A model that wants nothing but spaces still gets on: at most one space, or a line end and its indentation."""
    blanks = [token for token in range(VOCAB) if (piece := tokenizer().decode([token])) and not piece.strip()]
    [output] = answers(llm, schema(PERSON), logit_bias=[(token, 100.0) for token in blanks], temperature=0.0).outputs
    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text), PERSON)
    assert " " in output.text or "\n" in output.text


def test_max_tokens_ends_an_answer_with_length(llm: LLM) -> None:
    [output] = answers(llm, schema({"type": "string", "minLength": 100}), limit=20).outputs
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 20
    assert output.text.startswith('"')


def test_the_end_is_held_back_where_the_grammar_allows_more(llm: LLM) -> None:
    """And only there: an answer that can only end ends, however large min_tokens is."""
    for least in (1, 7, 20):
        output = answers(llm, regex("a{1,400}"), min_tokens=least, temperature=0.0, logit_bias=[(EOS, 100.0)]).outputs[
            0
        ]
        assert output.finish_reason == "stop"
        assert len(output.token_ids) == least + 1
    output = answers(llm, choice("yes"), min_tokens=50).outputs[0]
    assert (output.text, output.finish_reason) == ("yes", "stop")


def test_logprobs_are_of_the_unmasked_logits(llm: LLM) -> None:
    """The token that would have been sampled first without the grammar stays the most probable one reported."""
    free = llm.generate([PROMPT], Sampling(temperature=0.0, logprobs=3), max_new_tokens=1)[0].outputs[0]
    held = answers(llm, choice("yes"), temperature=0.0, logprobs=3).outputs[0]
    assert free.logprobs[0].top == held.logprobs[0].top
    assert held.logprobs[0].logprob < free.logprobs[0].logprob
    assert held.token_ids[0] != free.token_ids[0]


def test_siblings_follow_it_each_by_itself(llm: LLM) -> None:
    outputs = answers(llm, schema(PERSON), n=5).outputs
    assert len({output.text for output in outputs}) > 1
    alone = answers(llm, schema(PERSON)).outputs[0]
    assert_same(llm, outputs[0], alone)
    for output in outputs:
        jsonschema.validate(json.loads(output.text), PERSON)


def test_rows_without_a_grammar_are_as_ever(llm: LLM) -> None:
    plain = Sampling(seed=5)
    [alone] = llm.generate([PROMPT], plain, max_new_tokens=40)
    mixed = llm.generate(
        [PROMPT] * 3,
        [plain, Sampling(seed=1, grammar=schema(PERSON)), Sampling(seed=2, grammar=choice("x"))],
        max_new_tokens=40,
    )
    assert_same(llm, mixed[0].outputs[0], alone.outputs[0])
    assert mixed[2].outputs[0].text == "x"


# ---------------------------------------------------------------------------------------------- two steps in flight


def two_ahead(directory: Path, **options: Any) -> LLM:
    """Return a model on a CPU, planned for as on a device of its own."""
    config = EngineConfig(model=str(directory), dtype="float32", kv_blocks=128, threads=1, **options)
    executor = LocalExecutor(config)
    executor.depth = 2
    return LLM.over(config, executor, tokenizer())


@pytest.mark.parametrize("count", [1, THREADED - 1, THREADED, 9])
def test_two_steps_in_flight_change_no_token(checkpoint: Callable[[str], Path], count: int) -> None:
    """The masks of each step are written once the step before it is collected, whichever thread writes them."""
    asked = [Sampling(seed=i, grammar=schema(PERSON)) for i in range(count)] + [Sampling(seed=7)]
    found = []
    for depth in (1, 2):
        llm = two_ahead(checkpoint("llama"), deterministic=True)
        llm.executor.depth = depth
        found.append(
            [one.outputs[0].token_ids for one in llm.generate([PROMPT] * len(asked), asked, max_new_tokens=120)]
        )
        llm.close()
    assert found[0] == found[1]


def test_collect_does_not_wait_for_the_next_masks(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed while the loop commits the step and plans another.  Sampling waits for them."""
    llm = two_ahead(checkpoint("llama"))
    asked = [Sampling(seed=i, grammar=schema(PERSON)) for i in range(THREADED)]
    requests = [llm.submit(PROMPT, one, max_new_tokens=30) for one in asked]
    while not any(request.outputs[0].token_ids for request in requests):
        llm.step()
    executor, may_end, compute = llm.executor, threading.Event(), Grammars.compute
    waited: list[bool] = []

    def slow(grammars: Grammars) -> None:
        waited.append(threading.current_thread() is not threading.main_thread() and may_end.wait(patience(20)))
        compute(grammars)

    monkeypatch.setattr(Grammars, "compute", slow)
    assert isinstance(executor, LocalExecutor)
    llm.step()  # collects a step
    assert waited == []
    launched: list[Launched | Pending | Exception] = list(executor._in_flight)
    assert [type(step) for step in launched] == [Launched]
    threading.Timer(0.1, may_end.set).start()
    llm.step()
    assert waited[0]
    monkeypatch.undo()  # fewer rows than THREADED will be left
    while llm.unfinished:
        llm.step()
    assert {request.outputs[0].finish_reason for request in requests} <= {"stop", "length"}
    llm.close()


def test_a_step_whose_masks_fail_voids_the_next_one(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequences are computed again from the tokens that are known, and get the same ones."""
    llm = two_ahead(checkpoint("llama"), deterministic=True)
    asked = [Sampling(seed=i, grammar=schema(PERSON)) for i in range(THREADED)]
    expected = [one.outputs[0].token_ids for one in llm.generate([PROMPT] * THREADED, asked, max_new_tokens=40)]
    requests = [llm.submit(PROMPT, one, max_new_tokens=40) for one in asked]
    for _ in range(8):
        llm.step()
    fill, fail = Grammars.fill, [True]

    def failing(grammars: Grammars) -> None:
        fill(grammars)
        if fail.pop() if fail else False:
            raise MemoryError("no masks")

    monkeypatch.setattr(Grammars, "fill", failing)
    while llm.unfinished:
        llm.step()
    assert not fail
    assert [request.outputs[0].token_ids for request in requests] == expected
    llm.close()


# ---------------------------------------------------------------------------------------- preempted, failed, resumed


@pytest.mark.gpu
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_preempted_answers_follow_their_grammar_on_a_gpu(checkpoint: Callable[[str], Path], preempt: str) -> None:
    """Slots change hands while the step before, in which another sequence had them, has not been collected."""
    llm = LLM(
        str(checkpoint("llama")),
        device="cuda",
        dtype="bfloat16",
        max_model_len=512,
        kv_blocks=40,
        max_seqs=24,
        admission="threshold",
        admit_threshold=1.0,
        preempt=preempt,
        swap_memory_gib=0.01,
    )
    asked = [Sampling(seed=i, grammar=schema(PERSON) if i % 3 else "") for i in range(60)]
    found = llm.generate([PROMPT] * 60, asked, max_new_tokens=200)
    totals = llm.engine.core.report.totals
    llm.close()
    assert totals.preemptions
    outputs = [one.outputs[0] for one, wish in zip(found, asked, strict=True) if wish.grammar]
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    finished = [output for output in outputs if output.finish_reason == "stop"]
    assert len(finished) > len(outputs) / 2
    for output in finished:
        jsonschema.validate(json.loads(output.text), PERSON)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_a_preemption_changes_no_token(checkpoint: Callable[[str], Path], preempt: str) -> None:
    """A pool too small for all: matchers are rebuilt from the tokens known."""
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "block_size": 8, "max_model_len": 192}
    asked = [Sampling(seed=i, grammar=schema(PERSON)) for i in range(10)]
    roomy = LLM(str(checkpoint("llama")), **options, kv_blocks=256)
    expected = [one.outputs[0].token_ids for one in roomy.generate([PROMPT] * 10, asked, max_new_tokens=120)]
    roomy.close()
    tight = LLM(
        str(checkpoint("llama")),
        **options,
        kv_blocks=24,
        admission="threshold",
        admit_threshold=1.0,
        preempt=preempt,
        swap_memory_gib=0.01,
    )
    found = [one.outputs[0].token_ids for one in tight.generate([PROMPT] * 10, asked, max_new_tokens=120)]
    totals = tight.engine.core.report.totals
    tight.close()
    assert found == expected
    assert totals.preemptions
    assert bool(totals.swap_preemptions) == (preempt == "swap")


def test_a_grammar_that_dies_ends_its_request_alone(llm: LLM) -> None:
    """A grammar that no engine can compile, and one whose only tokens the client forbids."""
    mate = Sampling(seed=4, grammar=schema(PERSON))
    broken = Sampling(seed=4, grammar="start: nowhere")
    stuck = Sampling(
        seed=4, grammar=choice("yes"), allowed_token_ids=[tokenizer().encode("#", add_special_tokens=False)[0]]
    )
    found = llm.generate([PROMPT] * 3, [mate, broken, stuck], max_new_tokens=200)
    first, second, third = (one.outputs[0] for one in found)
    jsonschema.validate(json.loads(first.text), PERSON)
    assert second.finish_reason == third.finish_reason == "error"
    assert second.message.startswith(f"{FAULTY}: ")
    assert "nowhere" in second.message
    assert "grammar" in third.message
    assert_same(llm, first, answers(llm, schema(PERSON), seed=4).outputs[0])


def test_an_engine_without_grammars_refuses_by_name(checkpoint: Callable[[str], Path]) -> None:
    executor = ScriptedExecutor.load(EngineConfig())  # no checkpoint, so no tokenizer
    assert not executor.info.grammars
    llm = LLM.over(EngineConfig(), executor)
    [output] = llm.generate([[5, 6]], Sampling(grammar=choice("yes")))[0].outputs
    assert output.finish_reason == "error"
    assert "cannot enforce" in output.message


def test_a_step_that_failed_is_computed_again(checkpoint: Callable[[str], Path]) -> None:
    """The executor forgets every matcher, and the scheduler brings the tokens back."""
    llm = LLM(str(checkpoint("llama")), dtype="float32", kv_blocks=128, threads=1)
    asked = Sampling(seed=9, grammar=schema(PERSON))
    [expected] = llm.generate([PROMPT], asked, max_new_tokens=200)
    again = llm.submit(PROMPT, asked, max_new_tokens=200)
    for _ in range(12):
        llm.step()
    fail_next_step(llm)
    while llm.unfinished:
        llm.step()
    llm.close()
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


# ---------------------------------------------------------------------------------------------------- masks, matchers


def allowed(found: Grammars, slot: int) -> set[int]:
    bits = np.unpackbits(found.mask[slot].view(np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist())


def advance(found: Grammars, slot: int, tokens: list[int]) -> None:
    followers.advance(found.followers([slot]), tokens)


def errors(found: Grammars) -> dict[int, str]:
    return followers.advance(found.followers(range(4)), [0] * 4)


def test_padded_logits_are_never_allowed(checkpoint: Callable[[str], Path]) -> None:
    """The model has more logits than the tokenizer has tokens, in a number that 32 does not divide."""
    found = four_slots(checkpoint("llama"), vocab=VOCAB + 13)
    begin(found, 2, regex("(.|\n)*"), [])
    found.fill()
    assert found.mask.shape == (4, -(-(VOCAB + 13) // 32))
    assert max(allowed(found, 2)) < VOCAB
    assert allowed(found, 0) == set()


def test_every_end_token_is_allowed_where_the_grammar_accepts(checkpoint: Callable[[str], Path]) -> None:
    found = four_slots(checkpoint("llama"), eos=[EOS, 2])
    begin(found, 1, choice("a", "ab"), [])
    found.fill()
    assert not allowed(found, 1) & {EOS, 2}
    advance(found, 1, tokenizer().encode("a", add_special_tokens=False))
    found.fill()
    assert allowed(found, 1) >= {EOS, 2}


@settings(max_examples=examples(40))
@given(kinds(), st.integers(0, 2**32), st.data())
def test_a_matcher_is_rebuilt_from_its_tokens(
    checkpoint: Callable[[str], Path], what: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    """At any token the mask is that of a matcher which was given all tokens so far at once."""
    found, grammar, rng = four_slots(checkpoint("llama")), schema(what), random.Random(seed)
    begin(found, 0, grammar, [])
    tokens: list[int] = []
    for _ in range(data.draw(st.integers(0, 40))):
        found.fill()
        choices = allowed(found, 0) - {EOS}
        if not choices:
            break
        tokens.append(rng.choice(sorted(choices)))
        advance(found, 0, tokens[-1:])
    found.fill()
    begin(found, 3, grammar, tokens)
    found.fill()
    assert allowed(found, 3) == allowed(found, 0)
    assert not errors(found)


def test_a_token_that_the_grammar_forbids_is_an_error(checkpoint: Callable[[str], Path]) -> None:
    found = four_slots(checkpoint("llama"))
    begin(found, 0, choice("yes"), tokenizer().encode("no", add_special_tokens=False))
    begin(found, 1, choice("yes"), [])
    found.fill()
    assert set(errors(found)) == {0}
    assert allowed(found, 0) == set()
    assert allowed(found, 1)
    assert "\n" not in errors(found)[0]
    found.free(0)
    assert not errors(found)


def test_a_tokenizer_that_cannot_be_used_is_an_error_of_each_request(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    found = four_slots(tmp_path)
    begin(found, 0, choice("yes"), [])
    found.fill()
    assert errors(found) == {0: "this model's tokenizer cannot be used for grammars"}
    assert allowed(found, 0) == set()


def test_a_hostile_grammar_ends_its_own_request(checkpoint: Callable[[str], Path]) -> None:
    """One that passes the gateway's check, and grows beyond an engine's bounds at a later token."""
    found = four_slots(checkpoint("llama"))
    begin(found, 0, regex("((a{1,100}){1,100}){1,100}"), [])
    letter = tokenizer().encode("a", add_special_tokens=False)
    for _ in range(300):
        found.fill()
        if errors(found):
            break
        advance(found, 0, letter)
    assert errors(found)[0].startswith(FAILED)
    assert allowed(found, 0) == set()


# ---------------------------------------------------------------------------------------------------------- scripted


def test_the_scripted_executor_follows_grammars(checkpoint: Callable[[str], Path]) -> None:
    """Its scripted token where that is allowed, else the first allowed one."""
    config = EngineConfig(model=str(checkpoint("llama")), executor="scripted", kv_blocks=64)
    executor = ScriptedExecutor.load(config)
    assert executor.info.grammars
    llm = LLM.over(config, executor)
    [free] = llm.generate([PROMPT], Sampling(seed=10, grammar=regex("(.|\n){1000,}")), max_new_tokens=30)
    scripted = [scripted_token(10, 0, at, VOCAB) for at in range(30)]
    kept = sum(a == b for a, b in zip(free.outputs[0].token_ids, scripted, strict=True))
    assert kept > 20
    for _ in range(2):
        outputs = llm.generate([PROMPT], Sampling(seed=3, grammar=choice("yes", "no")), max_new_tokens=30, n=2)[
            0
        ].outputs
        for output in outputs:
            assert tokenizer().decode(output.token_ids[:-1]) in ("yes", "no")
            assert output.finish_reason == "stop"


def test_llguidance_is_the_release_that_was_tested() -> None:
    """A later release may know other keywords: look at ENFORCED of service/grammar/grammar.py again."""
    assert llguidance.__version__.startswith("1.")


def test_the_driver_s_worker_splits_a_step(checkpoint: Callable[[str], Path]) -> None:
    """The model is launched before the tokens that the mask depends on are known."""
    driver = Driver(checkpoint("llama"))
    [slot] = driver.add(PROMPT, Sampling(temperature=0, grammar=choice("yes")))
    texts: list[int] = []
    for _ in range(4):
        launched = driver.worker.launch_model(driver.plan())
        result = driver.commit(driver.worker.collect(driver.worker.launch_sampling(launched)))
        texts += result.tokens
        if texts[-1] == EOS:
            break
    assert tokenizer().decode(texts, skip_special_tokens=True) == "yes"
    assert slot == 0
