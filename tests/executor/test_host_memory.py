"""KV cache, swap space and weights within the memory limit of a container."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from quire.engine.common import host_resources
from quire.engine.config import EngineConfig
from quire.engine.executor import host_memory
from quire.engine.executor.errors import NotEnoughMemory
from quire.engine.executor.host_memory import GIB, PROCESS_BYTES, HostMemory

BLOCK = 1 << 20  # bytes of a KV block


def divide(
    limit_gib: float, *, weights_gib: float = 0.5, on_gpu: bool = False, ranks: int = 1, **given: Any
) -> HostMemory:
    return host_memory.divide(
        EngineConfig(**given),
        weights=int(weights_gib * GIB),
        block_bytes=BLOCK,
        on_gpu=on_gpu,
        ranks=ranks,
        limit=int(limit_gib * GIB),
    )


def test_with_memory_enough_the_defaults_stay() -> None:
    assert divide(64) == divide(4) == (GIB, GIB)
    assert divide(64, kv_memory_gib=8.0, swap_memory_gib=4.0) == (8 * GIB, 4 * GIB)
    assert divide(64, preempt="recompute") == (GIB, 0)
    assert divide(64, kv_blocks=7) == (7 * BLOCK, GIB)


@pytest.mark.parametrize("limit", [1.0, 1.7, 2.0, 2.5, 3.0, 3.5])
def test_defaults_shrink_until_all_fits(limit: float) -> None:
    kv, swap = divide(limit)
    total = kv + swap + GIB // 2 + PROCESS_BYTES
    assert kv <= GIB
    assert swap <= GIB
    assert total <= limit * GIB or (kv, swap) == (0, 0)
    assert kv + swap < 2 * GIB


def test_what_the_operator_asks_for_is_kept_and_defaults_make_way() -> None:
    kv, swap = divide(4, kv_memory_gib=2.0)
    assert kv == 2 * GIB
    assert swap == pytest.approx(0.4 * GIB)
    kv, swap = divide(2.5, swap_memory_gib=0.5)
    assert swap == GIB // 2
    assert kv == pytest.approx(0.4 * GIB)


@pytest.mark.parametrize(
    "given",
    [
        {"kv_memory_gib": 1.6},
        {"kv_blocks": 1600},
        {"swap_memory_gib": 1.6},
        {"kv_memory_gib": 0.8, "swap_memory_gib": 0.8},
    ],
)
def test_what_cannot_fit_is_refused_with_limit_and_value(given: dict[str, Any]) -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        divide(2, **given)
    asked = "1.56" if "kv_blocks" in given else "1.60"
    assert f"0.50 GiB of weights and {asked} GiB that " in str(caught.value)
    assert "exceed the memory limit of 2.00 GiB: lower them" in str(caught.value)


def test_what_may_not_fit_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert divide(2, kv_memory_gib=1.2).kv == int(1.2 * GIB)
    assert "the memory limit leaves 0.30 GiB for processes that may need 1.10" in caplog.text


def test_on_a_gpu_the_spare_pins_as_much_again() -> None:
    assert divide(64, on_gpu=True, weights_gib=0) == (0, GIB)
    kv, swap = divide(2, on_gpu=True, weights_gib=0)
    assert kv == 0
    assert 2 * swap + PROCESS_BYTES <= 2 * GIB
    assert divide(2, on_gpu=True, weights_gib=0, spare_on_gpu=False).swap > swap
    with pytest.raises(NotEnoughMemory):
        divide(2, on_gpu=True, weights_gib=0, swap_memory_gib=1.5)


def test_ranks_share_the_limit() -> None:
    """Each rank's configuration has its part of the swap space already."""
    assert divide(64, ranks=2, swap_memory_gib=0.5) == (GIB, GIB // 2)
    kv, swap = divide(3, ranks=2, swap_memory_gib=0.5)
    assert 2 * (kv + swap + GIB // 2) + PROCESS_BYTES <= 3 * GIB
    with pytest.raises(NotEnoughMemory, match=r"limit of 1.50 GiB of each of 2 ranks"):
        divide(3, ranks=2, kv_memory_gib=1.4)


def test_shared_weights_count_once() -> None:
    first, second = torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 100, bias=False)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    model.register_buffer("scales", torch.zeros(10))
    model.packed = torch.zeros(6, dtype=torch.uint8)
    assert host_memory.weight_bytes(model) == 40_000 + 40 + 6


def test_an_engine_stays_within_the_limit(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.engine.executor.local import LocalExecutor

    limit = PROCESS_BYTES + (64 << 20)
    monkeypatch.setattr(host_resources, "memory_limit", lambda: limit)
    config = EngineConfig(model=str(checkpoint("llama")), served_name="tiny", dtype="float32", max_model_len=64)
    executor = LocalExecutor(config)
    try:
        bytes_of_blocks = executor.info.kv_bytes_per_token * config.block_size
        assert 0 < (executor.blocks + executor.host_blocks) * bytes_of_blocks <= limit - PROCESS_BYTES
    finally:
        executor.close()
