"""Window groups on a GPU: tables, indices and blocks per group; against the same engine with one block table.

Block ids change no bit of a GPU's results, so texts are equal if the same steps run.  If other steps run, a temperature
of a million makes tokens independent of logits, and log-probabilities show what was computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.executor.kv_cache import GIB
from quire.engine.executor.loading import load
from quire.engine.llm import LLM, Completion
from quire.engine.wire.messages import FOREVER_MS, Beams, Generate, Sampling
from quire.loadtest.studies.tiny_checkpoints import VOCAB
from tests.executor.driver import answer, fail_next_step

pytestmark = pytest.mark.gpu

FAMILIES = ("gpt_oss", "gemma2", "gemma3_text", "qwen2", "cohere2")
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
NOISE = 0.15  # maximum difference of a log-probability by the order of sums in 16 bits
Windowed = Callable[[str], Path]


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(f"{count}{seed}").choices(range(3, VOCAB), k=count)


def hot(seed: int) -> Sampling:
    return Sampling(temperature=1e6, seed=seed, ignore_eos=True, logprobs=0)


def serve(checkpoint: Path, **changes: Any) -> LLM:
    """Freed blocks are NaN.  Measured times do not decide how prompts are cut."""
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_blocks": 400, "max_seqs": 40, "step_tokens": 256}
    options |= {
        "window_groups": "on",
        "max_model_len": 300,
        "itl_stretch": 0.0,
        "step_target_s": 0.0,
        "check_accounting": True,
    }
    config = EngineConfig(model=str(checkpoint), poison_free_blocks=True, **(options | changes))
    return LLM.over(config, load(config))


def one_table(checkpoint: Path, **changes: Any) -> LLM:
    llm = serve(checkpoint, window_groups="off", **changes)
    assert not llm.executor.info.windows
    return llm


def texts(llm: LLM, prompts: list[list[int]], sampling: Any = GREEDY, count: Any = 40, n: int = 1) -> list[list[int]]:
    completions = llm.generate(prompts, sampling, max_new_tokens=count, n=n)
    llm.engine.core.auditor.whole()
    return [output.token_ids for completion in completions for output in completion.outputs]


def logprobs(completions: list[Completion]) -> list[list[float]]:
    return [[entry.logprob for entry in each.logprobs] for one in completions for each in one.outputs]


PROMPTS = [words(1 + 13 * at % 131, at) for at in range(24)]


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "e4m3"}, {"block_size": 8}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_one_table(family: str, options: dict[str, Any], windowed: Windowed) -> None:
    """Prompts in one slice, from cached prefixes, and in chunks of 7; 24 sequences of other lengths in one batch."""
    grouped, plain = serve(windowed(family), **options), one_table(windowed(family), **options)
    assert [group.window for group in grouped.executor.info.windows] == [24]
    counts = [20 + 7 * at % 60 for at in range(len(PROMPTS))]
    first = texts(grouped, PROMPTS, count=counts)
    assert first == texts(plain, PROMPTS, count=counts)
    assert texts(grouped, PROMPTS, count=counts) == texts(plain, PROMPTS, count=counts)
    found = [llm.engine.core.report.totals.cached_prompt_tokens for llm in (grouped, plain)]
    assert found[0] == found[1] > 0
    grouped.close()
    plain.close()
    chunked = {"chunk_tokens": 7, "prefix_cache": False, **options}
    grouped, plain = serve(windowed(family), **chunked), one_table(windowed(family), **chunked)
    assert texts(grouped, PROMPTS) == texts(plain, PROMPTS)
    grouped.close()
    plain.close()


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "qwen2"])
def test_graphs_change_no_token(family: str, windowed: Windowed) -> None:
    """Graphs of decode steps and of steps with slices, padded and not; two steps are in flight."""
    sampled = Sampling(temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    mixture = [GREEDY if at % 3 else sampled for at in range(len(PROMPTS))]
    counts = [3 + 5 * at % 40 for at in range(len(PROMPTS))]
    found = []
    for seconds in (0.0, 60.0):
        llm = serve(windowed(family), graph_seconds=seconds)
        assert llm.executor.depth == 2
        found.append(texts(llm, PROMPTS, mixture, counts))
        llm.close()
    assert found[0] == found[1]


def test_graphs_of_a_takeover_have_the_indices_of_every_group(windowed: Windowed) -> None:
    """Graphs are recorded when their launches run the second time, and in idle moments."""
    llm = serve(windowed("gpt_oss"))
    want = [texts(llm, [prompt]) for prompt in PROMPTS[:6] for _ in range(3)]
    llm.close()
    llm = serve(windowed("gpt_oss"), standby=True)
    assert [texts(llm, [prompt]) for prompt in PROMPTS[:6] for _ in range(3)] == want
    while llm.executor.catch_up():
        pass
    assert [texts(llm, [prompt]) for prompt in PROMPTS[:6] for _ in range(3)] == want
    llm.close()


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen2"])
def test_choices_and_preemption_compute_the_same(family: str, preempt: str, windowed: Windowed) -> None:
    roomy = serve(windowed(family), kv_blocks=1000)
    want = roomy.generate(PROMPTS, hot(3), max_new_tokens=60, n=3)
    assert roomy.engine.core.report.totals.preemptions == 0
    roomy.close()
    tight = {"kv_blocks": 44, "admission": "threshold", "admit_threshold": 1.0}
    llm = serve(windowed(family), preempt=preempt, **tight)
    found = llm.generate(PROMPTS, hot(3), max_new_tokens=60, n=3)
    llm.engine.core.auditor.whole()
    totals = llm.engine.core.report.totals
    assert totals.preemptions > 0
    assert (totals.swap_preemptions > 0) == (preempt == "swap")
    for one, other in zip(want, found, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
    for right, own in zip(logprobs(want), logprobs(found), strict=True):
        assert own == pytest.approx(right, abs=NOISE)
    llm.close()


def test_every_byte_of_every_group_comes_back_from_the_host(windowed: Windowed) -> None:
    """The swap of each group, with blocks of several rounds of its staging buffer."""
    llm = serve(windowed("gemma2"), preempt="swap")
    worker = llm.executor._worker  # type: ignore[attr-defined]
    places: dict[int, int] = {}
    first = first_host = 0
    hosts = [worker.swap.host_blocks, *worker.swap.window_host_blocks]
    for shapes, host in zip(worker.kv.shapes, hosts, strict=True):
        tensors = [tensor for same in shapes for tensor in same]
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, device="cuda"))
        blocks = random.Random(1).sample(range(len(tensors[0])), min(90, len(tensors[0]) // 2, host))
        there = random.Random(2).sample(range(host), len(blocks))
        places |= {first + block: first_host + to for block, to in zip(blocks, there, strict=True)}
        first, first_host = first + len(tensors[0]), first_host + host
    every = [tensor for shapes in worker.kv.shapes for same in shapes for tensor in same]
    want = [tensor.clone() for tensor in every]
    worker.swap.moved()
    worker.swap.out(list(places.items()))
    for tensor in every:
        tensor.fill_(float("nan"))
    worker.swap.back([(there, block) for block, there in places.items()])
    torch.cuda.synchronize()
    begin = 0
    for shapes in worker.kv.shapes:
        count = len(shapes[0][0])
        own = [block - begin for block in places if begin <= block < begin + count]
        assert len(own) > 32
        begin += count
        for same in shapes:
            for tensor in same:
                right = want[next(at for at, each in enumerate(every) if each is tensor)]
                assert torch.equal(tensor[own], right[own])
                assert tensor.isnan().flatten(1).all(1).sum().item() == count - len(own)
    size, seconds = worker.swap.moved()
    assert size == 2 * sum(tensor[0].nbytes for block in places for tensor in group_of(worker.kv.shapes, block))
    assert seconds > 0
    llm.close()


def group_of(groups: list[list[list[torch.Tensor]]], block: int) -> list[torch.Tensor]:
    """Return the tensors of the group that an id of a plan belongs to."""
    for shapes in groups:
        if block < len(shapes[0][0]):
            return [tensor for same in shapes for tensor in same]
        block -= len(shapes[0][0])
    raise AssertionError(block)


@pytest.mark.parametrize("family", ["gemma2", "qwen2"])
def test_prompts_that_leave_a_cached_one_anywhere_compute_the_same(family: str, windowed: Windowed) -> None:
    base = words(150)
    asked = [[*base[:at], *range(5, 25)] for at in (16, 31, 63, 64, 65, 79, 80, 87, 88, 89, 100, 128, 149)]
    plain = serve(windowed(family), prefix_cache=False)
    want = plain.generate(asked, hot(1), max_new_tokens=20)
    plain.close()
    llm = serve(windowed(family), chunk_tokens=7)
    answer(llm, Generate("first", "g", base, 1, GREEDY, FOREVER_MS, anchors=[64]))
    found = [llm.generate([prompt], hot(1), max_new_tokens=20)[0] for prompt in asked]
    assert llm.engine.core.report.totals.cached_prompt_tokens > 0
    for right, own in zip(logprobs(want), logprobs(found), strict=True):
        assert own == pytest.approx(right, abs=NOISE)
    llm.close()


def test_beams_have_the_answers_of_one_table(windowed: Windowed) -> None:
    request = Generate("b", "g", words(60), 30, Sampling(ignore_eos=True), FOREVER_MS, n=2, beams=Beams(3))
    grouped, plain = serve(windowed("gemma2")), one_table(windowed("gemma2"))
    assert answer(grouped, request) == answer(plain, request)
    grouped.close()
    plain.close()


def test_drafts_compute_the_same(windowed: Windowed) -> None:
    """Steps with drafts write and read the blocks of every group; prompts repeat themselves, so drafts are found."""
    prompts = [words(9, at) * 9 for at in range(6)]
    found = []
    for drafts in ("off", "on"):
        llm = serve(windowed("qwen2"), drafts=drafts)
        found.append(logprobs(llm.generate(prompts, hot(2), max_new_tokens=50)))
        llm.engine.core.auditor.whole()
        llm.close()
    for right, own in zip(*found, strict=True):
        assert own == pytest.approx(right, abs=NOISE)


def test_a_failed_step_leaves_the_groups_usable(windowed: Windowed) -> None:
    llm = serve(windowed("gemma2"))
    want = texts(llm, PROMPTS)
    fail_next_step(llm)
    texts(llm, PROMPTS)
    assert texts(llm, PROMPTS) == want
    llm.close()


def test_memory_is_divided_between_the_groups(windowed: Windowed) -> None:
    """All groups together take what is configured, and the layers that see all tokens get more blocks than before."""
    memory = {"kv_blocks": 0, "kv_memory_gib": 0.02, "max_seqs": 8}
    grouped, plain = serve(windowed("gpt_oss"), **memory), one_table(windowed("gpt_oss"), **memory)
    size = sum(tensor.nbytes for cache in grouped.executor._worker._batch._caches for tensor in cache[:2])  # type: ignore[attr-defined]
    each = sum(group.block_bytes for group in grouped.executor.info.windows)
    assert 0.02 * GIB - 2 * each < size <= 0.02 * GIB
    assert 1.5 * plain.executor.blocks < grouped.executor.blocks < 2 * plain.executor.blocks
    grouped.close()
    plain.close()
