"""Banned sequences: against a plain reference and transformers' own, and never completed by a real engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from quire.engine.config import EngineConfig
from quire.engine.core.plan import Sampler
from quire.engine.executor.banned import BannedSequences, trie_of
from quire.engine.executor.base import ModelInfo, ScriptedExecutor, scripted_token
from quire.engine.executor.constraints import IMPOSSIBLE
from quire.engine.executor.followers import advance
from quire.engine.executor.local import LocalExecutor
from quire.engine.llm import LLM, Output
from quire.engine.wire.messages import Sampling
from tests.checkpoints import VOCAB, tokenizer
from tests.executor.driver import Driver, fail_next_step
from tests.executor.matchers import PERSON, PROMPT, choice, schema
from tests.matrix import examples

V = 70  # a vocabulary that needs three words of a mask, the last one in part
FEW = st.integers(0, 3)  # tokens that meet often
SEQUENCES = st.lists(st.lists(FEW, min_size=1, max_size=5), min_size=1, max_size=8)
EVERY_WAY: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2},
]


def forbidden(banned: list[list[int]], generated: list[int]) -> set[int]:
    """The slow and obvious way: the last token of each sequence whose other tokens end what was generated."""
    return {ids[-1] for ids in banned if generated[len(generated) - len(ids) + 1 :] == ids[:-1]}


def holds(tokens: list[int], sequence: list[int]) -> bool:
    return any(tokens[at : at + len(sequence)] == sequence for at in range(len(tokens) - len(sequence) + 1))


@given(SEQUENCES, st.lists(FEW, max_size=12))
def test_a_trie_forbids_what_would_complete_a_sequence(banned: list[list[int]], generated: list[int]) -> None:
    trie = trie_of(tuple(map(tuple, banned)))
    assert set(trie.forbidden(generated)) == forbidden(banned, generated)
    assert set(trie.forbidden(generated[max(0, len(generated) - trie.depth) :])) == forbidden(banned, generated)


@settings(max_examples=examples(50))
@given(SEQUENCES, st.lists(FEW, min_size=1, max_size=12))
def test_it_forbids_what_transformers_forbids(banned: list[list[int]], generated: list[int]) -> None:
    scores = NoBadWordsLogitsProcessor(banned, eos_token_id=V - 1)(torch.tensor([generated]), torch.zeros(1, V))
    assert set((scores[0] == -torch.inf).nonzero()[:, 0].tolist()) == forbidden(banned, generated)


def allowed(mask: Any, slot: int) -> set[int]:
    bits = np.unpackbits(mask[slot].view(np.uint8), bitorder="little")[:V]
    return set(bits.nonzero()[0].tolist())


def sampler(banned: list[list[int]], generated: list[int]) -> Sampler:
    return Sampler(Sampling(bad_words=banned), 2, [], [1, 1, *generated])  # a prompt that is not looked at


@settings(max_examples=examples(200))
@given(st.data())
def test_masks_follow_their_slots(data: st.DataObject) -> None:
    """Slots come and go, are rebuilt from known tokens, have a grammar's mask below or none: every mask is right, and
    every row that changed since it was sent is named."""
    mask = np.zeros((3, 3), np.int32)
    sent = mask.copy()
    found, running, follow = BannedSequences(mask), dict[int, tuple[list[list[int]], list[int]]](), set[int]()
    tokens = st.integers(0, V - 1) | FEW
    sequences = st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6)
    for _ in range(data.draw(st.integers(1, 12))):
        slot = data.draw(st.integers(0, 2))
        match data.draw(st.sampled_from(["start", "free", "resume", "step", "step", "step"])):
            case "start":
                running[slot] = data.draw(sequences), data.draw(st.lists(FEW, max_size=5))
                found.assign(slot, sampler(*running[slot]))
                (follow.add if data.draw(st.booleans()) else follow.discard)(slot)  # a grammar
            case "free":
                found.free(slot)
                running.pop(slot, None)
            case "resume" if slot in running:  # preempted, and begun again from the tokens known
                found.free(slot)
                found.assign(slot, sampler(*running[slot]))
            case _:
                below = {one: data.draw(st.sets(st.integers(0, V - 1))) for one in follow & running.keys()}
                for one, free in below.items():
                    flags = np.zeros(96, bool)
                    flags[list(free)] = True
                    mask[one] = np.packbits(flags, bitorder="little").view(np.int32)
                changed = found.fill(below)
                for one in {*changed, *below}:
                    sent[one] = mask[one]
                for one, (banned, generated) in running.items():
                    expected = below.get(one, set(range(V))) - forbidden(banned, generated)
                    assert allowed(mask, one) == expected
                    assert (sent[one] == mask[one]).all()
                drawn = [data.draw(FEW) for _ in range(3)]
                assert not advance(found.followers(range(3)), drawn)
                for one, (_, generated) in running.items():
                    generated.append(drawn[one])
    assert found.active == bool(running)
    found.reset()
    assert not found.active


def test_a_step_collected_late_reaches_the_sequence_that_had_the_slot() -> None:
    """On a GPU a slot may have changed hands when the tokens of the step before arrive."""
    mask = np.zeros((1, 3), np.int32)
    found = BannedSequences(mask)
    found.assign(0, sampler([[5, 6]], []))
    before = found.followers([0])
    found.free(0)
    found.assign(0, sampler([[5, 7]], []))
    advance(before, [5])
    found.fill(())
    assert allowed(mask, 0) == set(range(V))


# ---------------------------------------------------------------------------------------------------- a real engine


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    made = LLM(str(checkpoint("llama")), dtype="float32", kv_blocks=256, threads=1, poison_free_blocks=True)
    yield made
    made.close()


def generate(llm: LLM, *, count: int = 40, n: int = 1, **sampling: Any) -> list[Output]:
    [found] = llm.generate([PROMPT], Sampling(ignore_eos=True, **sampling), max_new_tokens=count, n=n)
    return found.outputs


@pytest.mark.parametrize("sampling", EVERY_WAY)
@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_no_answer_completes_a_banned_sequence(llm: LLM, sampling: dict[str, Any], length: int) -> None:
    """And until a token is forbidden for the first time, it is the plain answer."""
    plain = generate(llm, n=3, **sampling)
    banned = [one.token_ids[at : at + length] for one in plain for at in (5, 20)]
    held = generate(llm, n=3, bad_words=banned, **sampling)
    assert held != plain
    for one, other in zip(held, plain, strict=True):
        assert len(one.token_ids) == 40
        assert not any(holds(one.token_ids, sequence) for sequence in banned)
        first = next(at for at in range(40) if forbidden(banned, other.token_ids[:at]))
        assert one.token_ids[:first] == other.token_ids[:first]
    alone = generate(llm, bad_words=banned, **sampling)
    assert alone[0].token_ids == held[0].token_ids  # siblings, and the prefix cache, change nothing


def test_a_sequence_that_begins_in_the_prompt_is_not_looked_for(llm: LLM) -> None:
    [plain] = generate(llm, temperature=0.0, count=4)
    [held] = generate(llm, temperature=0.0, count=4, bad_words=[[PROMPT[-1], plain.token_ids[0]]])
    assert held.token_ids == plain.token_ids


def test_requests_without_them_are_as_ever_and_have_no_mask(llm: LLM) -> None:
    plain, held = Sampling(seed=5, ignore_eos=True), Sampling(seed=5, ignore_eos=True, bad_words=[[3, 4]])
    [alone] = llm.generate([PROMPT], plain, max_new_tokens=30)
    completions = [llm.submit(PROMPT, how, max_new_tokens=30) for how in (plain, held)]
    assert isinstance(llm.executor, LocalExecutor)
    assert llm.executor._worker is not None
    worker, samplers, masked = llm.executor._worker, llm.executor._worker._samplers, set()
    while llm.unfinished:
        llm.step()
        masked.add(int((samplers._records["mask"][list(worker._batch.decoding_slots)] != 0).sum()))
        assert not llm.unfinished or samplers.following
    assert masked == {1}
    assert completions[0].outputs[0].token_ids == alone.outputs[0].token_ids
    llm.generate([PROMPT], plain, max_new_tokens=2)
    assert not samplers.following  # nothing is filled, and on a GPU no step waits


def test_a_grammar_and_banned_sequences_both_hold(llm: LLM) -> None:
    """The answer is still JSON of the schema, without what the first one began with."""
    for seed in range(6):
        [plain] = generate_grammar(llm, schema(PERSON), seed=seed)
        banned = [plain.token_ids[at : at + 2] for at in range(8, len(plain.token_ids) - 1, 5)]
        [held] = generate_grammar(llm, schema(PERSON), seed=seed, bad_words=banned)
        assert not any(holds(held.token_ids, sequence) for sequence in banned)
        if held.finish_reason == "stop":
            jsonschema.validate(json.loads(held.text), PERSON)
        else:  # names and keys that the schema demands may need what is banned
            assert held.finish_reason == "length" or held.message == IMPOSSIBLE


def generate_grammar(llm: LLM, grammar: str, **sampling: Any) -> list[Output]:
    [found] = llm.generate([PROMPT], Sampling(grammar=grammar, **sampling), max_new_tokens=300)
    return found.outputs


def test_where_no_token_is_left_the_request_ends_with_an_error_alone(llm: LLM) -> None:
    texts = [tokenizer().decode([token]) for token in range(VOCAB)]
    ways = [[token] for token, text in enumerate(texts) if text and "yes".startswith(text)]
    stuck = Sampling(grammar=choice("yes"), bad_words=ways)
    bound = Sampling(allowed_token_ids=[7, 8], bad_words=[[7, 7], [7, 8], [8, 8], [8, 7]], ignore_eos=True)
    mate = Sampling(seed=4, ignore_eos=True)
    found = [one.outputs[0] for one in llm.generate([PROMPT] * 3, [stuck, bound, mate], max_new_tokens=20)]
    assert [one.finish_reason for one in found] == ["error", "error", "length"]
    assert found[0].message == found[1].message == IMPOSSIBLE
    assert "bad_words" in IMPOSSIBLE
    assert len(found[1].token_ids) == 1
    assert found[2].token_ids == generate(llm, seed=4, count=20)[0].token_ids


def test_token_ids_beyond_the_vocabulary_are_refused(llm: LLM) -> None:
    wrong: list[list[list[int]]] = [[[5, VOCAB]], [[-1, 5]], [[]]]
    for words in wrong:
        [found] = generate(llm, bad_words=words)
        assert found.finish_reason == "error"
        assert f"0 to {VOCAB - 1}" in found.message


# ------------------------------------------------------------------------------------- preempted, failed, resumed


FOUR = [70, 80, 90, 100]
# Neither the last token nor the one before may come next: a draw that has lost them takes another token half the time.
NO_RETURN = [[a, a] for a in FOUR] + [[a, b, a] for a in FOUR for b in FOUR if a != b]


def asked() -> list[Sampling]:
    how = Sampling(temperature=2.0, ignore_eos=True, allowed_token_ids=FOUR, bad_words=NO_RETURN)
    return [msgspec.structs.replace(how, seed=i) for i in range(10)]


def keeps_moving(tokens: list[int]) -> bool:
    return all(len({*tokens[at : at + 3]}) == 3 for at in range(len(tokens) - 2))


@pytest.mark.gpu
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_no_answer_completes_one_on_a_gpu(checkpoint: Callable[[str], Path], preempt: str) -> None:
    """Slots change hands while the step before, in which another sequence had them, has not been collected.

    Logits depend there on the batch size, so the test does not check which tokens are sampled instead."""
    made = LLM(
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
    plain = [Sampling(seed=i, ignore_eos=True) for i in range(60)]
    found = [one.outputs[0].token_ids for one in made.generate([PROMPT] * 60, plain, max_new_tokens=150)]
    often = [[ids[at : at + 2] for at in range(0, 148, 7)] for ids in found]
    wanted = [
        Sampling(seed=i, ignore_eos=True, bad_words=often[i] if i % 3 else [], logprobs=0, logprob_token_ids=[i])
        for i in range(60)
    ]
    held = [one.outputs[0] for one in made.generate([PROMPT] * 60, wanted, max_new_tokens=150)]
    totals = made.engine.core.report.totals
    made.close()
    assert totals.preemptions
    for i, one in enumerate(held):
        assert len(one.token_ids) == 150
        assert not any(holds(one.token_ids, sequence) for sequence in wanted[i].bad_words)
        assert [[token for token, _ in at.top] for at in one.logprobs] == [[i]] * 150


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_a_preemption_changes_no_token(checkpoint: Callable[[str], Path], preempt: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "block_size": 8, "max_model_len": 192}
    roomy = LLM(str(checkpoint("llama")), **options, kv_blocks=256)
    expected = [one.outputs[0].token_ids for one in roomy.generate([PROMPT] * 10, asked(), max_new_tokens=120)]
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
    found = [one.outputs[0].token_ids for one in tight.generate([PROMPT] * 10, asked(), max_new_tokens=120)]
    totals = tight.engine.core.report.totals
    tight.close()
    assert found == expected
    assert all(map(keeps_moving, found))
    assert totals.preemptions
    assert bool(totals.swap_preemptions) == (preempt == "swap")


def test_another_engine_goes_on_from_the_known_tokens(checkpoint: Callable[[str], Path]) -> None:
    """As after a kill: at any token, with a sequence half generated."""
    driver = Driver(checkpoint("llama"))

    def answer(sampling: Sampling, known: list[int] | None = None) -> list[int]:
        [slot] = driver.add(PROMPT, sampling, output=known)
        [tokens] = driver.generate([slot], 16)
        driver.free(slot)
        return tokens

    whole = answer(asked()[2])
    assert keeps_moving(whole)
    for known in range(1, 15):
        assert answer(asked()[2], whole[:known]) == whole


def test_a_step_that_failed_is_computed_again(checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(str(checkpoint("llama")), dtype="float32", kv_blocks=128, threads=1)
    [expected] = llm.generate([PROMPT], asked()[3], max_new_tokens=60)
    again = llm.submit(PROMPT, asked()[3], max_new_tokens=60)
    for _ in range(12):
        llm.step()
    fail_next_step(llm)
    while llm.unfinished:
        llm.step()
    llm.close()
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_the_scripted_executor_honours_them() -> None:
    """With no tokenizer, so with no grammars: its scripted token, or the first one that is allowed."""
    llm = LLM.over(EngineConfig(), ScriptedExecutor(ModelInfo("m", "f", V, 512, [0], 0), 64))
    script = [scripted_token(3, 0, at, V) for at in range(12)]
    outputs = llm.generate([[5, 6]], Sampling(seed=3, bad_words=[script[4:6], [0]]), max_new_tokens=12)[0].outputs
    assert outputs[0].token_ids == [*script[:5], 1, *script[6:]]
