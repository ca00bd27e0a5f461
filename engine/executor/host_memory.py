"""Divides the host's memory between KV cache and swap space, within the memory limit of the container.

    limit / ranks = weights on the CPU + KV cache on a CPU + swap space + PROCESS_BYTES / ranks

Default sizes shrink to the free memory, swap space first.  Configured sizes are kept; if they exceed the limit, the
engine refuses to start, because the kernel would kill it later.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import NamedTuple

import torch

from quire.engine.config import EngineConfig
from quire.engine.executor.errors import NotEnoughMemory

log = logging.getLogger(__name__)

GIB = 1 << 30
CPU_DEFAULT_GIB = 1.0  # KV cache on a CPU
DEFAULT_SWAP_GIB = EngineConfig().swap_memory_gib
# Resident MiB of `quire serve builtin` without KV cache and weights, after a few requests: engine 412, spare 391,
# gateway 106, supervisor 50, Redis 13; in sum 972.  Each value includes shared pages.  The rest of PROCESS_BYTES is
# for queued requests.
PROCESS_BYTES = int(1.1 * GIB)


class HostMemory(NamedTuple):
    """Bytes of one rank's memory on the host."""

    kv: int  # bytes of KV cache; 0 on a GPU, whose own memory has it
    swap: int


def weight_bytes(model: torch.nn.Module, device: str = "cpu") -> int:
    """Return the bytes of a model's tensors on a kind of device, including packed weights.

    Tensors that share memory count once."""
    sizes: dict[int, int] = {}
    for module in model.modules():
        named = {**module.__dict__, **module._parameters, **module._buffers}
        packed = [vars(value).values() for value in named.values() if dataclasses.is_dataclass(value)]
        for tensor in itertools.chain(named.values(), *packed):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == device:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def divide(config: EngineConfig, *, weights: int, block_bytes: int, on_gpu: bool, ranks: int, limit: int) -> HostMemory:
    """Return the sizes of KV cache and swap space.

    `weights`: bytes of this rank's weights in host memory.  `block_bytes`: bytes of a KV block.  `limit`: bytes of
    memory for all ranks.  Raises NotEnoughMemory if the configured values exceed it."""
    share, processes = limit // ranks, PROCESS_BYTES // ranks
    copies = 2 if on_gpu and config.spare_on_gpu else 1  # a spare engine holds pinned memory of the same size
    fixed_kv = on_gpu or bool(config.kv_blocks or config.kv_memory_gib)
    full_kv = 0 if on_gpu else config.kv_blocks * block_bytes or int((config.kv_memory_gib or CPU_DEFAULT_GIB) * GIB)
    fixed_swap = config.swap_memory_gib not in (DEFAULT_SWAP_GIB, DEFAULT_SWAP_GIB / ranks)
    full_swap = 0 if config.preempt == "recompute" else int(config.swap_memory_gib * GIB)
    own = (full_kv if fixed_kv else 0) + (copies * full_swap if fixed_swap else 0)
    if own and weights + own > share:
        whose = f" of each of {ranks} ranks" if ranks > 1 else ""
        raise NotEnoughMemory(
            f"{weights / GIB:.2f} GiB of weights and {own / GIB:.2f} GiB that kv_memory_gib, kv_blocks and "
            f"swap_memory_gib ask for exceed the memory limit of {share / GIB:.2f} GiB{whose}: lower them, or raise it"
        )
    left = max(0, share - weights - processes)
    kv = full_kv if fixed_kv else min(full_kv, max(0, left - full_swap) if fixed_swap else left * 2 // 3)
    swap = full_swap if fixed_swap else min(full_swap, max(0, left - kv) // copies)
    if (kv, swap) != (full_kv, full_swap):
        log.info("within the memory limit: KV cache %.2f GiB, swap space %.2f GiB", kv / GIB, swap / GIB)
    if weights + kv + copies * swap + processes > share:
        rest = max(0, share - weights - kv - copies * swap)
        log.warning(
            "the memory limit leaves %.2f GiB for processes that may need %.2f: lower kv_memory_gib or "
            "swap_memory_gib, or raise the limit of %.2f GiB",
            *(rest / GIB, processes / GIB, share / GIB),
        )
    return HostMemory(kv, swap)
