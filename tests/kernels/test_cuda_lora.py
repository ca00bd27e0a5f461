"""LoRA kernels on a GPU against float64: adapters of several ranks in slots, rows of several adapters and of none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from quire.engine.executor import ops
from quire.engine.executor.lora.device_slots import DeviceSlots, rows_by_slot
from quire.engine.executor.lora.layouts import GpuBlocks
from quire.engine.executor.lora.sites import Part, Site
from tests.kernels.test_layers import DTYPES

CUDA = torch.device("cuda")
SLOTS, MAX_RANK, MAX_ROWS = 5, 128, 400
RANKS = [[16, 16, 16], [1, 0, 7], [24, 128, 16], [0, 0, 0], [64, 8, 33]]  # per slot: of each part; 0: none
SITES = [
    (64, [64]),
    (72, [40, 8, 24]),
    (4096, [4096, 1024, 1024]),
    (14336, [4096]),
    (256, [136, 136]),
]
HALF = [dtype for dtype in DTYPES if dtype.itemsize == 2]


class Adapted(NamedTuple):
    """One site in all slots."""

    rows: ops.DeviceAdapters
    a: list[list[torch.Tensor | None]]  # per slot and part [rank, in], float64 of what is stored
    b: list[list[torch.Tensor | None]]  # [out, rank]


def adapted(inputs: int, outputs: list[int], dtype: torch.dtype, max_rank: int = MAX_RANK) -> Adapted:
    """Fill all slots as the packer does, with ranks up to `max_rank`."""
    firsts = [sum(outputs[:part]) for part in range(len(outputs))]
    site = Site(
        inputs, tuple(Part(f"p{i}", first, out) for i, (first, out) in enumerate(zip(firsts, outputs, strict=True)))
    )
    slots = DeviceSlots([site], slots=SLOTS, max_rank=max_rank, max_rows=MAX_ROWS, dtype=dtype, device=CUDA)
    layout, generator = GpuBlocks(max_rank), torch.Generator().manual_seed(inputs)
    all_a, all_b = [], []
    for slot, ranks in enumerate([[min(rank, max_rank) for rank in ranks] for ranks in RANKS]):
        fields, size, shrinks = [0] * ops.LORA_FIELDS, 0, []
        a: list[torch.Tensor | None] = []
        b: list[torch.Tensor | None] = []
        for part, (rank, out) in enumerate(zip(ranks, outputs, strict=False)):
            if not rank:
                a.append(None)
                b.append(None)
                continue
            shrink = (torch.randn(rank, inputs, generator=generator) / inputs**0.5).to(dtype)
            expand = torch.randn(out, rank, generator=generator).to(dtype)
            a.append(shrink.double())
            b.append(expand.double())
            shrinks.append(layout.with_ranks(shrink.float().numpy()))
            flat = torch.from_numpy(layout.expand(expand.float().numpy())).to(dtype)
            slots.rows.weights[slot, size : size + len(flat)] = flat.cuda()
            fields[2 + 4 * part : 4 + 4 * part] = size, len(shrinks[-1])
            size += len(flat)
        if shrinks:
            whole = np.concatenate(shrinks)
            flat = torch.from_numpy(layout.shrink(whole)).to(dtype)
            slots.rows.weights[slot, size : size + len(flat)] = flat.cuda()
            fields[:2] = size, len(whole)
        slots.rows.table[slot, 0] = torch.tensor(fields)
        all_a.append(a)
        all_b.append(b)
    return Adapted(slots.rows, all_a, all_b)


def place(rows: ops.DeviceAdapters, slot_of_row: np.ndarray) -> None:
    order, tiles = rows_by_slot(slot_of_row, SLOTS)
    rows.tiles.fill_(-1)
    rows.order[: len(order)] = torch.from_numpy(order).cuda()
    rows.tiles[: len(tiles)] = torch.from_numpy(tiles).cuda()
    rows.slot_of_row[: len(slot_of_row)] = torch.from_numpy(slot_of_row).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("inputs", "outputs"), SITES)
@pytest.mark.parametrize("count", [1, 7, 32, 33, 300])
@pytest.mark.parametrize("complete", [False, True])
def test_rows_get_what_their_adapter_makes(
    complete: bool, count: int, inputs: int, outputs: list[int], dtype: torch.dtype
) -> None:
    """Rows without an adapter keep their bits.  The error is that of rounding A x and the sum."""
    site, of_row, x, y = step_of(count, inputs, outputs, dtype)
    before = y.clone()
    h = ops.lora_shrink(x, site.rows, 0, complete=complete)
    assert ops.lora_expand(h, site.rows, 0, y) is y
    check(site, of_row, outputs, x, before, y)


def step_of(
    count: int, inputs: int, outputs: list[int], dtype: torch.dtype, max_rank: int = MAX_RANK
) -> tuple[Adapted, np.ndarray, torch.Tensor, torch.Tensor]:
    """Return a site, the slot of each row, x and y."""
    site = adapted(inputs, outputs, dtype, max_rank)
    of_row = np.random.default_rng(count).integers(-1, SLOTS, count).astype(np.int32)
    of_row[0] = 2
    place(site.rows, of_row)
    x = torch.randn(count, inputs, device=CUDA).to(dtype)
    return site, of_row, x, torch.randn(count, sum(outputs), device=CUDA).to(dtype)


def check(
    site: Adapted, of_row: np.ndarray, outputs: list[int], x: torch.Tensor, before: torch.Tensor, y: torch.Tensor
) -> None:
    """Fail unless y is `before` plus what the adapters make of x."""
    exact = before.double().cpu()
    noise = torch.zeros_like(exact)
    for row, slot in enumerate(of_row.tolist()):
        first = 0
        for part, out in enumerate(outputs):
            a, b = (site.a[slot][part], site.b[slot][part]) if slot >= 0 else (None, None)
            if a is not None and b is not None:
                h = a @ x[row].double().cpu()
                exact[row, first : first + out] += b @ h
                noise[row, first : first + out] += b.abs() @ h.abs()
            first += out
    untouched = of_row < 0
    assert torch.equal(y[untouched], before[untouched])
    unit = torch.finfo(y.dtype).eps
    assert ((y.double().cpu() - exact).abs() <= unit * (exact.abs() + noise) + 1e-4).all()
    assert (y[of_row == 2] != before[of_row == 2]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("inputs", "outputs"), SITES)
@pytest.mark.parametrize("count", [1, 7, 16, 32])
def test_one_launch_adds_what_two_add(count: int, inputs: int, outputs: list[int], dtype: torch.dtype) -> None:
    site, of_row, x, y = step_of(count, inputs, outputs, dtype, max_rank=40 if len(outputs) < 3 else 32)
    before = y.clone()
    assert ops.lora_add(x, site.rows, 0, y) is y
    check(site, of_row, outputs, x, before, y)
    if len(outputs) == 2:
        found = ops.lora_add(x, site.rows, 0, before, silu_mul=True)
        assert found is not None
        assert torch.equal(found, ops.silu_mul(y))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("inputs", "outputs"), SITES)
@pytest.mark.parametrize("count", [1, 7, 32, 64, 300])
def test_a_branch_of_a_graph_gives_the_bits_of_two_launches(
    count: int, inputs: int, outputs: list[int], dtype: torch.dtype
) -> None:
    """Replayed with other rows and inputs than those of the capture."""
    site, _, x, y = step_of(count, inputs, outputs, dtype)
    silu_mul = len(outputs) == 2

    def chain(y: torch.Tensor) -> torch.Tensor:
        """Two GEMMs of one stream: the branch of the second one waits for the first."""
        ops.lora_on_branch(x, site.rows, 0, lambda: y)
        return ops.lora_on_branch(x, site.rows, 0, lambda: y, silu_mul=silu_mul)

    into, stream = y.clone(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(into.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = chain(into)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        place(site.rows, rng.integers(-1, SLOTS, count).astype(np.int32))
        x.copy_(torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype))
        into.copy_(y)
        graph.replay()
        two = ops.lora_expand(ops.lora_shrink(x, site.rows, 0), site.rows, 0, y.clone())
        h = ops.lora_shrink(x, site.rows, 0)
        assert torch.equal(found, ops.lora_expand(h, site.rows, 0, two, silu_mul=silu_mul))


@pytest.mark.gpu
def test_one_launch_takes_no_more_rows_or_ranks_than_it_has_memory_for() -> None:
    site, _, x, y = step_of(32, 64, [40, 8], torch.bfloat16)
    assert ops.lora_add(x, site.rows, 0, y) is None  # ranks of 2 * 128
    site, _, x, y = step_of(33, 64, [64], torch.bfloat16)
    assert ops.lora_add(x, site.rows, 0, y) is None


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 8, 16])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, [4096, 1024, 1024]), (4096, [4096])])
def test_a_shared_input_is_complete_when_the_adapters_read_it(count: int, inputs: int, outputs: list[int]) -> None:
    """In a CUDA graph of four layers, each of which makes its input of the one before: the same bits as with a pause
    behind each launch."""
    dtype, layers = torch.bfloat16, 4
    site, _, x, _ = step_of(count, inputs, outputs, dtype, max_rank=16)
    weight = (torch.randn(sum(outputs), inputs, device=CUDA) / inputs**0.5).to(dtype)
    scale = torch.ones(inputs, dtype=dtype, device=CUDA)

    def run(x: torch.Tensor, *, pause: bool) -> torch.Tensor:
        for _ in range(layers):
            normed = ops.rms_norm(x, scale, 1e-5)
            if pause:
                torch.cuda.synchronize()
            y, ready = ops.linear_sharing_x(normed, weight, None, None)
            assert ready
            if pause:
                torch.cuda.synchronize()
            found = ops.lora_add(normed, site.rows, 0, y, x_is_ready=ready and not pause)
            assert found is y
            x = y[:, :inputs].contiguous()
        return x

    inner = x.clone()
    run(inner, pause=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(inner, pause=False)
    for seed in range(30):
        inner.copy_(torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype))
        graph.replay()
        assert torch.equal(found, run(inner, pause=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("count", [1, 16, 33, 300])
def test_the_activation_is_that_of_the_plain_operator(count: int, dtype: torch.dtype) -> None:
    """Bit for bit, with an adapter and without."""
    site = adapted(256, [136, 136], dtype)
    of_row = np.random.default_rng(count).integers(-1, SLOTS, count).astype(np.int32)
    place(site.rows, of_row)
    x = torch.randn(count, 256, device=CUDA).to(dtype)
    y = torch.randn(count, 272, device=CUDA).to(dtype) * 3
    h = ops.lora_shrink(x, site.rows, 0)
    found = ops.lora_expand(h, site.rows, 0, y.clone(), silu_mul=True)
    assert torch.equal(found, ops.silu_mul(ops.lora_expand(h, site.rows, 0, y)))


@pytest.mark.parametrize("count", [0, 1, 31, 100])
def test_tiles_cover_each_row_with_an_adapter_once(count: int) -> None:
    of_row = np.random.default_rng(count).integers(-1, SLOTS, count).astype(np.int32)
    order, tiles = rows_by_slot(of_row, SLOTS)
    assert len(tiles) == ops.lora_tiles(count, SLOTS)
    found: list[int] = []
    for slot, first, rows, _ in tiles[tiles[:, 0] >= 0].tolist():
        assert 0 < rows <= ops.LORA_TILE
        assert (of_row[order[first : first + rows]] == slot).all()
        found += order[first : first + rows].tolist()
    assert sorted(found) == np.flatnonzero(of_row >= 0).tolist()
    assert sorted(order.tolist()) == list(range(count))


@pytest.mark.parametrize(("out", "inner"), [(1, 8), (16, 32), (40, 72)])
def test_packed_blocks_hold_what_each_lane_multiplies(out: int, inner: int) -> None:
    """As cuda/lora/lora.h says, element by element."""
    matrix, layout = np.arange(1, out * inner + 1, dtype=np.float32).reshape(out, inner), GpuBlocks(128)
    a = layout.with_ranks(matrix)
    wide = np.pad(a, ((0, 0), (0, -inner % 32)))
    blocks = layout.shrink(a).reshape(len(a) // 16, -1, 32, 16)
    b = np.pad(matrix, ((0, -out % 32), (0, -inner % 16)))
    expanded = layout.expand(matrix).reshape(len(b) // 32, -1, 32, 16)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for element in range(16):
            half, at = divmod(element, 8)
            assert (blocks[:, :, lane, element] == wide[g + 8 * half :: 16, 8 * t + at :: 32]).all()
            j, rank = divmod(element, 4)
            feature = 8 * (g // 2) + 2 * j + g % 2
            assert (expanded[:, :, lane, element] == b[feature::32, 4 * t + rank :: 16]).all()
