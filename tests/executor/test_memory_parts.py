"""The bytes of weights and KV cache that an executor reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from quire.engine.config import EngineConfig
from quire.engine.executor.host_memory import weight_bytes
from quire.engine.executor.local import LocalExecutor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_cache_are_those_of_the_checkpoint_and_the_pool(
    checkpoint: Callable[[str], Path], dtype: str
) -> None:
    model = checkpoint("llama")
    stored = sum(tensor.numel() for path in model.glob("*.safetensors") for tensor in load_file(path).values())
    plain = EngineConfig(model=str(model), device="cpu", kv_blocks=24, max_model_len=128)
    executor = LocalExecutor(msgspec.structs.replace(plain, dtype=dtype))
    try:
        memory = executor.memory_parts
        size = getattr(torch, dtype).itemsize
        # A packed layer is padded to strips of outputs, and the log-odds' head may be a copy of tied embeddings.
        assert stored * size <= memory["weights"] <= 2 * stored * size
        assert memory["kv_cache"] == 24 * 16 * executor.info.kv_bytes_per_token
        assert memory.keys() == {"weights", "kv_cache"}
    finally:
        executor.close()


def test_tensors_that_share_memory_count_once() -> None:
    module = torch.nn.Module()
    module.one = torch.zeros(100)
    module.other = module.one[:50]
    assert weight_bytes(module) == 400
    assert weight_bytes(module, "cuda") == 0
