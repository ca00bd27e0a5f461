"""The LoRA operators of a GPU in plain torch: readable twins, which run on any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.engine.executor import ops


def lora_shrink(x: Tensor, adapters: ops.DeviceAdapters, site: int) -> Tensor:
    """As `ops.lora_shrink`, in one partial sum; what no row has is NaN."""
    h = torch.full((1, len(x), adapters.ranks[site]), float("nan"))
    for first, rows, fields, weights in _tiles(adapters, site, len(x)):
        if ranks := fields[1]:
            a = unpacked_a(weights[fields[0] :], ranks, adapters.steps[site])
            h[0, first : first + len(rows), :ranks] = x[rows].float() @ a.float()[:, : x.shape[1]].T
    return h


def lora_expand(h: Tensor, adapters: ops.DeviceAdapters, site: int, y: Tensor, *, silu_mul: bool = False) -> Tensor:
    """As `ops.lora_expand`."""
    whole = y.clone() if silu_mul else y
    for first, rows, fields, weights in _tiles(adapters, site, len(y)):
        column = first_rank = 0
        for part, features in enumerate(adapters.features[site]):
            offset, ranks = fields[2 + 4 * part : 4 + 4 * part]
            if ranks:
                b = unpacked_b(weights[offset:], features, ranks).float()
                sums = h[:, first : first + len(rows), first_rank : first_rank + ranks].sum(0).to(y.dtype).float()
                columns = slice(column, column + features)
                whole[rows, columns] = (whole[rows, columns].float() + sums @ b.T).to(y.dtype)
            column, first_rank = column + features, first_rank + ranks
    return ops.silu_mul(whole) if silu_mul else y


def lora_on_gpu(
    x: Tensor, adapters: ops.DeviceAdapters, site: int, y: Tensor, *, silu_mul: bool = False, x_is_ready: bool = False
) -> Tensor:
    """As `ops.lora_on_gpu`."""
    assert not x_is_ready  # no GEMM of a CPU says so
    return lora_expand(lora_shrink(x, adapters, site), adapters, site, y, silu_mul=silu_mul)


def _tiles(adapters: ops.DeviceAdapters, site: int, count: int) -> Iterator[tuple[int, Tensor, list[int], Tensor]]:
    """(first index into order, rows, fields of the site, weights of the slot) of each tile."""
    for slot, first, rows, _ in adapters.tiles[: ops.lora_tiles(count, len(adapters.weights))].tolist():
        if slot >= 0:
            of = adapters.order[first : first + rows].long()
            assert (adapters.slot_of_row[of] == slot).all()
            yield first, of, adapters.table[slot, site].tolist(), adapters.weights[slot]


def unpacked_a(flat: Tensor, ranks: int, steps: int) -> Tensor:
    """A [ranks, 32 * steps] from packed blocks."""
    blocks = flat[: ranks * steps * ops.LORA_INPUTS].view(ranks // ops.LORA_RANKS, steps, 8, 4, 2, 8)
    return blocks.permute(0, 4, 2, 1, 3, 5).reshape(ranks, -1)


def unpacked_b(flat: Tensor, features: int, ranks: int) -> Tensor:
    """B [features, ranks] from packed blocks."""
    count = -(-features // ops.LORA_FEATURES)
    blocks = flat[: count * ops.LORA_FEATURES * ranks].view(count, ranks // ops.LORA_RANKS, 4, 2, 4, 4, 4)
    return blocks.permute(0, 2, 5, 3, 1, 4, 6).reshape(-1, ranks)[:features]
