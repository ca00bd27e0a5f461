from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.engine.config import EngineConfig
from quire.engine.core.plan import Sampler, Slice, Start, StepPlan
from quire.engine.executor.base import Executor, StepError
from quire.engine.executor.errors import NotEnoughMemory
from quire.engine.executor.loading import load
from quire.engine.llm import LLM
from quire.engine.wire.messages import Sampling

SAMPLER = Sampler(Sampling(temperature=0), 4, [])
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def executor(checkpoint: Callable[[str], Path]) -> Iterator[Executor]:
    model = str(checkpoint("llama"))
    made = load(EngineConfig(model=model, kv_blocks=80, max_seqs=4, threads=1, poison_free_blocks=True))
    made.depth = 2  # as on a device of its own
    yield made
    made.close()
    made.close()  # harmless


def prompt(step: int, slot: int = 0, block: int = 0) -> StepPlan:
    return StepPlan(step, starts=[Start(slot, [block])], slices=[Slice(slot, 0, PROMPT, SAMPLER)])


def test_what_it_says_of_itself(executor: Executor, checkpoint: Callable[[str], Path]) -> None:
    assert executor.info.name == str(checkpoint("llama"))
    assert len(executor.info.fingerprint) == 64
    assert executor.info.kv_bytes_per_token == 2 * 2 * 2 * 64 * 4
    assert executor.blocks == 80


def test_on_a_cpu_nothing_is_planned_ahead(checkpoint: Callable[[str], Path]) -> None:
    made = load(EngineConfig(model=str(checkpoint("llama")), kv_blocks=80, max_seqs=4, threads=1))
    assert made.depth == 1
    made.close()


def test_two_plans_in_flight_equal_one_at_a_time(executor: Executor) -> None:
    executor.submit(prompt(1))
    ahead = []
    for step in range(2, 9):
        executor.submit(StepPlan(step))  # before the token it continues from is known here
        ahead += executor.collect().tokens
    ahead += executor.collect().tokens
    alone = []
    executor.submit(StepPlan(9, freed_slots=[0]))
    assert executor.collect().slots == []
    executor.submit(prompt(10))
    alone += executor.collect().tokens
    for step in range(11, 18):
        executor.submit(StepPlan(step))
        alone += executor.collect().tokens
    assert ahead == alone
    assert len(ahead) == 8


def test_no_more_than_depth(executor: Executor) -> None:
    executor.submit(prompt(1))
    executor.submit(StepPlan(2))
    with pytest.raises(RuntimeError, match=r"2 steps in flight"):
        executor.submit(StepPlan(3))
    executor.collect()
    executor.collect()
    with pytest.raises(RuntimeError, match=r"no step in flight"):
        executor.collect()


def test_a_failed_step_voids_all_in_flight_and_nothing_else(executor: Executor) -> None:
    executor.submit(prompt(1))
    before = executor.collect().tokens
    executor.submit(StepPlan(2, starts=[Start(1, [10_000])], slices=[Slice(1, 0, [5], SAMPLER)]))  # no such block
    executor.submit(StepPlan(3))
    with pytest.raises(StepError, match=r"IndexError: .* is 160000"):
        executor.collect()
    with pytest.raises(RuntimeError, match=r"no step in flight"):
        executor.collect()
    executor.submit(StepPlan(4))
    assert executor.collect().slots == []  # all slots are free
    executor.submit(prompt(5))
    assert executor.collect().tokens == before


def test_too_little_memory_for_one_sequence(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(NotEnoughMemory, match=r"has 63 blocks of 16 tokens .*max_model_len 1024 needs 64"):
        load(EngineConfig(model=str(checkpoint("llama")), kv_blocks=63, max_model_len=1024, threads=1))


def test_a_context_that_does_not_fit_becomes_what_the_cache_holds(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    executor = load(EngineConfig(model=str(checkpoint("llama")), kv_blocks=3, max_seqs=2, threads=1))
    assert executor.info.max_model_len == 48
    said = [record.getMessage() for record in caplog.records if "max_model_len" in record.getMessage()]
    assert said == [
        "max_model_len is 48 tokens, which is what the KV cache holds; the model was made for 1024: raise "
        "kv_memory_gib for more"
    ]
    executor.close()
    with pytest.raises(NotEnoughMemory, match="has 0 blocks"):
        load(EngineConfig(model=str(checkpoint("llama")), kv_memory_gib=1e-6, threads=1))


@pytest.mark.parametrize(
    "impossible",
    [
        Sampling(temperature=0, allowed_token_ids=[9], stop_token_ids=[9], min_tokens=1),
        Sampling(temperature=1, allowed_token_ids=[9], stop_token_ids=[9], min_tokens=1, top_k=3),
        Sampling(temperature=1, repetition_penalty=1e-320),
    ],
)
def test_an_impossible_request_leaves_the_prefix_cache_alone(
    executor: Executor, checkpoint: Callable[[str], Path], impossible: Sampling
) -> None:
    """As the engine serves it, from request to answer: an impossible request harms only itself."""
    config = EngineConfig(model=str(checkpoint("llama")), kv_blocks=80, max_seqs=4, check_accounting=True)
    llm, prompt = LLM.over(config, executor), list(range(10, 110))
    [first] = llm.generate([prompt], max_new_tokens=3)
    [refused] = llm.generate([prompt], impossible, max_new_tokens=3)
    [output] = refused.outputs
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert "no token is possible" in output.message
    [again] = llm.generate([prompt], max_new_tokens=3)
    assert again.cached_tokens == 96
    assert again.outputs == first.outputs
