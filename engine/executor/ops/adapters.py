"""LoRA operators: add B A x to the rows of a step that have an adapter, at each site (GEMM) that adapters change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AdapterRows:
    """The rows of a step that have a LoRA adapter, on a CPU: arguments of `lora` that are the same at all sites."""

    weights: list[torch.Tensor]  # per adapter [elements], dtype of the model: its packed matrices
    tables: list[torch.Tensor]  # per adapter [sites, 14] int64: offsets and sizes of the matrices (csrc/ops.cpp)
    rows: torch.Tensor  # [n] int32: rows of the step, ascending within an adapter
    starts: torch.Tensor  # [adapters + 1] int32: adapter g has rows[starts[g] : starts[g + 1]]


LORA_FIELDS, LORA_PARTS = 14, 3  # int64 fields per site of a table; maximum linear layers that share a GEMM


def lora(x: torch.Tensor, adapters: AdapterRows, site: int, y: torch.Tensor) -> None:
    """Add the output of LoRA adapters to rows of y: y[row] += B A x[row], on a CPU.

    x [T, in], y [T, out] have the model's dtype; rows of y are contiguous.  site: index of the GEMM in the tables.
    Sums are float32; A x is rounded to the dtype.  A row's bits do not depend on the batch; other rows are untouched.
    """
    torch.ops.quire.lora.default(x, adapters.weights, adapters.tables, adapters.rows, adapters.starts, site, y)


# Sizes on a GPU, as in csrc/cuda/lora/lora.h: rows per tile; ranks, inputs and features per packed block.
LORA_TILE, LORA_RANKS, LORA_INPUTS, LORA_FEATURES = 32, 16, 32, 32
LORA_BRANCH_ROWS = 128  # maximum rows for which A x runs on a parallel branch of a CUDA graph, which slows larger GEMMs
LORA_ALIGNED = 8  # a site's inputs, and the outputs of its layers, must be multiples of this
_LORA_CTA_INPUTS, _LORA_SPLITS = 32, 8  # blocks of inputs per CTA and round; maximum partial sums for many rows
_LORA_CTAS = 264  # CTAs that fill a GPU: 2 on each of 132 multiprocessors


@dataclass(frozen=True)
class DeviceAdapters:
    """LoRA adapters in the slots of a GPU, and the rows of the running step with adapters: arguments of `lora_shrink`
    and `lora_expand` that are the same at all sites.  Every tensor keeps its address."""

    weights: torch.Tensor  # [slots, elements], dtype of the model: packed matrices
    table: torch.Tensor  # [slots, sites, 14] int64: offsets and sizes of the matrices (csrc/ops.cpp)
    order: torch.Tensor  # [rows] int32: rows with an adapter, sorted by slot
    tiles: torch.Tensor  # [tiles, 4] int32: slot (-1: unused tile), first index into `order`, number of rows, 0
    slot_of_row: torch.Tensor  # [rows] int32; -1: no adapter
    features: list[list[int]]  # outputs of each layer, per site
    ranks: list[int]  # per site, the ranks of all its layers together at the maximum rank
    steps: list[int]  # blocks of inputs, per site


def lora_on_gpu(
    x: torch.Tensor,
    adapters: DeviceAdapters,
    site: int,
    y: torch.Tensor,
    *,
    silu_mul: bool = False,
    x_is_ready: bool = False,
) -> torch.Tensor:
    """Add the output of the adapters for x [T, in] to rows of y [T, out], in one launch if possible, else in two.

    Returns y.  Arguments as for `lora_add` and `lora_expand`."""
    found = lora_add(x, adapters, site, y, silu_mul=silu_mul, x_is_ready=x_is_ready)
    return lora_expand(lora_shrink(x, adapters, site), adapters, site, y, silu_mul=silu_mul) if found is None else found


def has_lora_branch(rows: int, device: torch.device) -> bool:
    """Return whether `lora_on_branch` supports this number of rows now, and is the fastest way."""
    if rows > LORA_BRANCH_ROWS or device.type != "cuda":
        return False
    return torch.cuda.is_current_stream_capturing() and _has_clusters(device)


def lora_on_branch(
    x: torch.Tensor,
    adapters: DeviceAdapters,
    site: int,
    gemm: Callable[[], torch.Tensor],
    *,
    silu_mul: bool = False,
) -> torch.Tensor:
    """Add the output of the adapters for x [T, in] to rows of y [T, out], the result of `gemm`, in a CUDA graph.

        up to LORA_TILE rows    y = GEMM ────────────────┬─> y += deltas
                                A x ─> deltas = B A x ───┘
        more rows               y = GEMM ─┬─> y += B A x
                                A x ──────┘

    Returns y, with the same bits as `lora_expand`.  Call it only while a graph is captured.

    silu_mul: return silu(gate) * up instead, for all rows of y = [gate, up]."""
    computing, branch = torch.cuda.current_stream(x.device), _branch(x.device)
    complete, features, rows = torch.cuda.Event(), adapters.features[site], len(x)
    complete.record(computing)
    y = gemm()
    branch.wait_event(complete)
    with torch.cuda.stream(branch):
        h = lora_shrink(x, adapters, site, complete=True)
        if few := rows <= LORA_TILE:
            deltas = torch.empty(rows, sum(features), dtype=torch.float32, device=x.device)
            where = adapters.weights, adapters.table, adapters.order, _tiles(rows, adapters)
            torch.ops.quire.lora_store_deltas.default(h, *where, site, features, deltas)
    computing.wait_stream(branch)
    if not few:
        return lora_expand(h, adapters, site, y, silu_mul=silu_mul)
    out = y.new_empty(rows, y.shape[1] // 2) if silu_mul else None
    torch.ops.quire.lora_add_deltas.default(deltas, adapters.slot_of_row, y, out)
    return y if out is None else out


@functools.cache
def _branch(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def lora_add(
    x: torch.Tensor,
    adapters: DeviceAdapters,
    site: int,
    y: torch.Tensor,
    *,
    silu_mul: bool = False,
    x_is_ready: bool = False,
) -> torch.Tensor | None:
    """Fuse `lora_shrink` and `lora_expand` into one launch.  Returns None, and changes nothing, if there are too many
    rows or ranks for it, or the GPU is older than Hopper.

    x_is_ready: the flag that `linear_sharing_x` returned for the preceding GEMM, which computed y from x."""
    if len(x) > LORA_TILE:
        return None
    if x.stride(0) % LORA_ALIGNED or x.data_ptr() % 16:
        x, x_is_ready = x.contiguous(), False
    out = y.new_empty(len(y), y.shape[1] // 2) if silu_mul else None
    where = adapters.weights, adapters.table, adapters.order, _tiles(len(y), adapters), adapters.slot_of_row
    sizes = adapters.ranks[site], adapters.features[site]
    if not torch.ops.quire.lora_add.default(x, *where, site, *sizes, x_is_ready, y, out):
        return None
    return y if out is None else out


def _tiles(rows: int, adapters: DeviceAdapters) -> torch.Tensor:
    return adapters.tiles[: lora_tiles(rows, len(adapters.weights))]


def lora_tiles(rows: int, slots: int) -> int:
    """Return the maximum number of tiles for `rows` rows."""
    return min(rows, rows // LORA_TILE + slots)


def lora_shrink(x: torch.Tensor, adapters: DeviceAdapters, site: int, *, complete: bool | None = None) -> torch.Tensor:
    """Return A x of the rows with an adapter, for `lora_expand`.  x [T, in], dtype of the model.

    complete: True: return the complete sums, rounded to the dtype of x (Hopper or later); False: partial sums in
    float32; None: the faster of the two."""
    if x.stride(0) % LORA_ALIGNED or x.data_ptr() % 16:
        x = x.contiguous()
    rows, ranks, steps = len(x), adapters.ranks[site], adapters.steps[site]
    tiles = _tiles(rows, adapters)
    if _has_clusters(x.device) if complete is None else complete:
        h = torch.empty(1, rows, ranks, dtype=x.dtype, device=x.device)
    else:
        splits = -(-steps // _LORA_CTA_INPUTS)  # one round per CTA
        if rows > LORA_TILE:
            wanted = -(-_LORA_CTAS // (max(1, len(tiles)) * ranks // LORA_RANKS))
            splits = min(splits, max(1, min(wanted, _LORA_SPLITS)))
        h = torch.empty(splits, rows, ranks, dtype=torch.float32, device=x.device)
    where = adapters.weights, adapters.table, adapters.order, tiles
    torch.ops.quire.lora_shrink.default(x, *where, site, h)
    return h


@functools.cache
def _has_clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def lora_expand(
    h: torch.Tensor, adapters: DeviceAdapters, site: int, y: torch.Tensor, *, silu_mul: bool = False
) -> torch.Tensor:
    """Add the output of the adapters to rows of y [T, out]: y[row] += B h, where h is A x.  Returns y.

    Sums are float32, A x is rounded to the dtype of y; rows without an adapter are untouched.

    silu_mul: return silu(gate) * up instead, for all rows of y = [gate, up]."""
    out = y.new_empty(len(y), y.shape[1] // 2) if silu_mul else None
    where = adapters.weights, adapters.table, adapters.order, _tiles(len(y), adapters), adapters.slot_of_row
    torch.ops.quire.lora_expand.default(h, *where, site, adapters.features[site], y, out)
    return y if out is None else out
