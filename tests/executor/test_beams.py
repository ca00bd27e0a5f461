"""Beam search through scheduler and worker, against transformers' generate in float32, token for token."""

from __future__ import annotations

import copy
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from quire.engine.core.plan import Slice, Start, StepPlan
from quire.engine.llm import LLM, Output
from quire.engine.wire.messages import Beams, Sampling
from tests.checkpoints import VOCAB
from tests.executor.driver import Driver

Checkpoint = Callable[[str], Path]
Early = bool | Literal["never"]
NEW = 12


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    """With free blocks poisoned: a beam that read one would have NaN for candidates."""
    options: dict[str, Any] = {"dtype": "float32", "kv_blocks": 160, "block_size": 16, "max_seqs": 24, "threads": 1}
    made = LLM(str(checkpoint("llama")), poison_free_blocks=True, **options)
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint, reference: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return reference("llama")


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(3, 60))] for _ in range(count)]


@torch.no_grad()
def theirs(model: PreTrainedModel, prompt: list[int], ends: list[int], **how: Any) -> list[tuple[list[int], float]]:
    config = GenerationConfig(
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )
    found = model.generate(torch.tensor([prompt], device=model.device), generation_config=config)
    scores = found.sequences_scores.tolist() if how["num_beams"] > 1 else [0.0]
    answers = []
    for tokens, score in zip(found.sequences.tolist(), scores, strict=True):
        new = tokens[len(prompt) :]
        at = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
        answers.append((new[:at], score))
    return answers


def likely_ends(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Two tokens that some beams meet and others do not."""
    found = theirs(model, prompt, [VOCAB - 1], num_beams=4, num_return_sequences=4)
    return [found[0][0][-3], found[-1][0][4]]


def same(ours: list[Output], want: list[tuple[list[int], float]], width: int) -> None:
    assert [output.token_ids for output in ours] == [tokens for tokens, _ in want]
    if width > 1:
        assert [output.score for output in ours] == pytest.approx([score for _, score in want], rel=1e-5)


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0, -1.0])
def test_answers_equal_transformers(llm: LLM, model: PreTrainedModel, penalty: float, early: Early) -> None:
    """Widths 1 to 8, all in one batch with a sampled request."""
    ends = likely_ends(model, prompts(1)[0])
    sampling = Sampling(temperature=0, stop_token_ids=ends, ignore_eos=True)
    other = llm.submit([4, 5, 6], Sampling(seed=3), max_new_tokens=30)
    made = []
    for width, prompt in zip(range(1, 9), prompts(8), strict=True):
        beams = Beams(width, penalty, early)
        made.append(llm.submit(prompt, sampling, max_new_tokens=NEW, n=width, beams=beams))
    while llm.unfinished:
        llm.step()
    for width, prompt, completion in zip(range(1, 9), prompts(8), made, strict=True):
        how: dict[str, Any] = {"num_beams": width, "num_return_sequences": width}
        if width > 1:
            how |= {"length_penalty": penalty, "early_stopping": early}
        same(completion.outputs, theirs(model, prompt, ends, **how), width)
    assert len(other.outputs[0].token_ids) == 30 or other.outputs[0].finish_reason == "stop"
    llm.engine.core.auditor.whole()
    assert llm.engine.core.pool.available == llm.engine.core.pool.total


@pytest.mark.parametrize(("block_size", "blocks"), [(8, 40), (32, 22)])
def test_groups_that_preempt_each_other_find_the_same_answers(
    checkpoint: Checkpoint, model: PreTrainedModel, block_size: int, blocks: int
) -> None:
    """Six groups want more blocks than there are; every table and count is checked after each step."""
    options: dict[str, Any] = {"dtype": "float32", "block_size": block_size, "max_seqs": 24, "threads": 1}
    options |= {"max_model_len": 100, "kv_blocks": blocks, "admission": "threshold", "admit_threshold": 1.0}
    llm = LLM(str(checkpoint("llama")), poison_free_blocks=True, **options)
    sampling = Sampling(temperature=0, ignore_eos=True)
    asked = [prompt + [9] * (60 - len(prompt)) for prompt in prompts(6)]
    made = [llm.submit(prompt, sampling, max_new_tokens=NEW, n=4, beams=Beams(4)) for prompt in asked]
    while llm.unfinished:
        llm.step()
        llm.engine.core.auditor.whole()
    assert llm.engine.core.report.totals.preemptions > 0
    for prompt, completion in zip(asked, made, strict=True):
        same(completion.outputs, theirs(model, prompt, [VOCAB], num_beams=4, num_return_sequences=4), 4)
    llm.close()


def test_candidates_are_the_log_softmax_in_float32(checkpoint: Checkpoint) -> None:
    """A slot that does not sample next to one that does; the slot is not in the following steps."""
    driver = Driver(checkpoint("llama"))
    driver.add(list(range(3, 30)))
    driver.step()
    table = [driver.free_blocks.pop()]
    plan = driver.plan()
    beam = Slice(9, 0, [5, 6, 7], candidates=11)
    result = driver.run(StepPlan(plan.step, starts=[Start(9, table)], edits=plan.edits, slices=[*plan.slices, beam]))
    row = driver.worker.logits[-1].float().log_softmax(-1).topk(11)
    assert result.slots == [0]
    assert result.candidates == {9: (row.indices.tolist(), row.values.tolist())}
    driver.commit(result)
    assert driver.step().candidates == {}


def test_beams_with_one_token_each_join_the_step_of_the_slots_that_decode(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slices but theirs: their rows are behind those that decode, and only for this step."""
    driver = Driver(checkpoint("llama"))
    first, second = driver.add(list(range(3, 30))) + driver.add(list(range(5, 12)))
    driver.step()
    tables = {slot: [driver.free_blocks.pop()] for slot in (9, 4)}
    plan = driver.plan()
    starts = [Start(slot, table) for slot, table in tables.items()]
    prompts = [Slice(slot, 0, [5, 6, 7], candidates=3) for slot in tables]
    driver.commit(driver.run(StepPlan(plan.step, starts=starts, edits=plan.edits, slices=[*plan.slices, *prompts])))
    mixed = driver.worker._mixed
    monkeypatch.setattr(driver.worker, "_mixed", None)  # not called
    for position, tokens in ((3, (8, 9)), (4, (10, 8))):
        plan = driver.plan()
        pieces = [Slice(slot, position, [token], candidates=5) for slot, token in zip(tables, tokens, strict=True)]
        result = driver.run(StepPlan(plan.step, edits=plan.edits, slices=[*plan.slices, *pieces]))
        assert result.slots == [first, second]
        rows = driver.worker.logits
        assert len(rows) == 4
        for slot, row in zip(tables, rows[2:].float().log_softmax(-1), strict=True):
            best = row.topk(5)
            assert result.candidates[slot] == (best.indices.tolist(), best.values.tolist())
        driver.commit(result)
    monkeypatch.setattr(driver.worker, "_mixed", mixed)
    # With a prompt in the step, beams are slices of it, with the same result.
    again = [Slice(slot, 4, [token], candidates=5) for slot, token in zip(tables, (10, 8), strict=True)]
    driver.add(list(range(40, 60)))
    plan = driver.plan()
    beside = driver.run(
        StepPlan(plan.step, starts=plan.starts, edits=plan.edits, slices=[*plan.slices, *again], forks=plan.forks)
    )
    for slot in tables:
        assert beside.candidates[slot][0] == result.candidates[slot][0]
        assert beside.candidates[slot][1] == pytest.approx(result.candidates[slot][1], abs=1e-4)
    driver.commit(beside)
    assert driver.step().candidates == {}
    assert len(driver.worker.logits) == 3


def test_a_beam_whose_logits_are_not_finite_fails(checkpoint: Checkpoint) -> None:
    driver = Driver(checkpoint("llama"))
    table = [driver.free_blocks.pop() for _ in range(2)]
    result = driver.run(StepPlan(1, starts=[Start(3, table)], slices=[Slice(3, 20, [5], candidates=4)], poison=table))
    assert set(result.failed) == {3}
    assert result.candidates == {}


def test_many_slots_ask_for_different_counts(checkpoint: Checkpoint) -> None:
    from quire.engine.executor.candidates import find_candidates

    logits = torch.randn(150, 20)
    found = find_candidates(logits, 3, [(slot, 1 + slot % 4) for slot in range(140)])
    assert found is not None
    for slot, (ids, logprobs) in found.by_slot().items():
        want = logits[3 + slot].log_softmax(-1).topk(1 + slot % 4)
        assert (ids, logprobs) == (want.indices.tolist(), want.values.tolist())
    assert list(itertools.islice(found.by_slot(), 3)) == [0, 1, 2]
    assert find_candidates(logits, 0, []) is None


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [200, 26])
def test_on_a_gpu_scores_are_those_of_the_answers(checkpoint: Checkpoint, model: PreTrainedModel, blocks: int) -> None:
    """In bfloat16, with and without groups that preempt each other.

    Each score is that of its answer in the float32 model, up to the noise of bfloat16: the largest error that
    transformers' own bfloat16 forward makes in one of these scores.  The best answers are on average as good as those
    of transformers' search in bfloat16."""
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "block_size": 16, "max_seqs": 40}
    options |= {"max_model_len": 100, "kv_blocks": blocks, "admission": "threshold", "admit_threshold": 1.0}
    llm = LLM(str(checkpoint("llama")), poison_free_blocks=True, **options)
    sampling = Sampling(temperature=0, ignore_eos=True)
    asked = [prompt + [9] * (60 - len(prompt)) for prompt in prompts(6)]
    plain = llm.submit(asked[0], Sampling(temperature=0, ignore_eos=True), max_new_tokens=30)
    made = [llm.submit(prompt, sampling, max_new_tokens=NEW, n=4, beams=Beams(4)) for prompt in asked]
    while llm.unfinished:
        llm.step()
        llm.engine.core.auditor.whole()
    assert (llm.engine.core.report.totals.preemptions > 0) == (blocks == 26)
    assert len(plain.outputs[0].token_ids) == 30
    llm.close()
    half = copy.deepcopy(model).bfloat16().cuda()
    found = [(prompt, output) for prompt, made_of in zip(asked, made, strict=True) for output in made_of.outputs]
    exact = [mean_logprob(model, prompt, output.token_ids) for prompt, output in found]
    noise = max(
        abs(mean_logprob(half, prompt, output.token_ids) - want)
        for (prompt, output), want in zip(found, exact, strict=True)
    )
    assert 0 < noise < 0.05
    for (_, output), want in zip(found, exact, strict=True):
        assert output.score == pytest.approx(want, abs=2 * noise)
    ours = [max(exact[at : at + 4]) for at in range(0, len(exact), 4)]
    best = [theirs(half, prompt, [VOCAB], num_beams=4, num_return_sequences=4)[0][0] for prompt in asked]
    their_scores = [mean_logprob(model, prompt, answer) for prompt, answer in zip(asked, best, strict=True)]
    assert statistics.fmean(ours) >= statistics.fmean(their_scores) - noise


@torch.no_grad()
def mean_logprob(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> float:
    """The score of an answer with length_penalty 1, by a forward over all of it."""
    known = torch.tensor([prompt + answer], device=model.device)
    logprobs = model(input_ids=known, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return float(logprobs.gather(1, known[0, len(prompt) :, None]).mean())
