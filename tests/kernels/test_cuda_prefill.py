"""paged_attention on a GPU: prompt chunks, and mixes of chunks and decodes, against a float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.executor import ops
from tests.kernels.paged import NAN, Batch, check_sinks, error, make_batch, reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
# Queries, keys and values are exact in both.  Softmax weights are rounded to the dtype before P V (fp16 with an e4m3
# cache), and so is the output.  Measured over these tests: at most 2.4e-3 and 3.0e-4.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def assert_close(batch: Batch, window: int = 0, soft_cap: float = 0.0, scale: float | None = None) -> None:
    exact = reference(batch, window, soft_cap, scale)
    out = batch.to("cuda").attend(window, soft_cap, scale)
    if exact.numel():
        assert error(out, exact) <= TOLERANCE[batch.q.dtype]


LENS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 700]


@pytest.mark.parametrize("e4m3", [False, True], ids=["", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_every_head_size_and_dtype(dtype: torch.dtype, dim: int, e4m3: bool) -> None:
    """Complete prompts, then second halves; also soft cap and window, on head sizes with few tests elsewhere."""
    whole = make_batch(LENS, LENS, dim=dim, dtype=dtype, e4m3=e4m3)
    assert_close(whole)
    halves = make_batch(LENS, [-(-n // 2) for n in LENS], dim=dim, dtype=dtype, e4m3=e4m3, heads=8)
    assert_close(halves)
    assert_close(halves, window=100, soft_cap=5.0)


@pytest.mark.parametrize("e4m3", [False, True], ids=["", "e4m3"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (5, 1), (14, 2), (32, 2), (71, 1), (1, 1), (40, 40)])
def test_every_block_size_and_head_grouping(block_size: int, heads: int, kv_heads: int, e4m3: bool) -> None:
    lens, queries = [1, 40, 300, 64, 190], [1, 40, 1, 3, 117]
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": 128, "block_size": block_size}
    assert_close(make_batch(lens, queries, **shape, e4m3=e4m3, dtype=torch.bfloat16))


@pytest.mark.parametrize("soft_cap", [0.0, 5.0, 50.0])
@pytest.mark.parametrize("window", [0, 1, 16, 100, 300, 5000])
def test_window_and_soft_cap(window: int, soft_cap: float) -> None:
    """Scores of both signs up to about 20, so that the cap matters."""
    batch = make_batch([700, 20, 257, 1, 2000], [150, 2, 17, 1, 900], spread=4.0, dim=128, dtype=torch.float16)
    assert_close(batch, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("e4m3", [False, True], ids=["", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_sinks(dtype: torch.dtype, dim: int, e4m3: bool) -> None:
    """Complete prompts, chunks, decodes between them, and few queries after many keys, which use split-KV."""
    lens = [*LENS, 0, 9000]
    shape: dict[str, Any] = {"heads": 12, "kv_heads": 4, "dim": dim, "dtype": dtype, "e4m3": e4m3}
    check_sinks(make_batch(LENS, LENS, **shape), TOLERANCE[dtype])
    check_sinks(
        make_batch(lens, [1 if n % 2 else -(-n // 2) for n in LENS] + [3, 20], **shape), TOLERANCE[dtype], window=3000
    )
    check_sinks(make_batch([5000], [5], **shape), TOLERANCE[dtype])


def test_scale_is_applied() -> None:
    assert_close(make_batch([50, 9], [2, 9], dtype=torch.float16), scale=0.7)


def test_many_short_and_few_long() -> None:
    """A step of several hundred sequences, and chunks after a long cached prefix, which use split-KV."""
    lens = [1 + 31 * i % 170 for i in range(300)]
    assert_close(make_batch(lens, [1 + i % n for i, n in enumerate(lens)], dtype=torch.bfloat16))
    assert_close(make_batch([6000, 3], [130, 2], heads=8, kv_heads=1, dim=128, dtype=torch.bfloat16))
    assert_close(make_batch([4000, 4100, 9], [2, 16, 4], heads=8, kv_heads=2, dim=128, dtype=torch.float16))
    assert_close(make_batch([4000, 4100, 9], [2, 16, 4], heads=4, kv_heads=2, dim=80, dtype=torch.float16), window=2500)


@pytest.mark.parametrize("queries", [3, 600])
def test_32k_context(queries: int) -> None:
    assert_close(make_batch([32768], [queries], heads=4, kv_heads=1, dim=128, dtype=torch.bfloat16))


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_a_chunk_large_enough_for_large_tiles(dim: int) -> None:
    """More tiles than the GPU runs at once, so that CTAs take several."""
    assert_close(make_batch([1500, 2500, 90], [1500, 1100, 80], heads=16, kv_heads=4, dim=dim, dtype=torch.bfloat16))


def test_decodes_and_chunks_in_one_call() -> None:
    """Decodes are first, as the scheduler lists them; then chunks, single queries among them."""
    lens = [1, 500, 64, 3000, 17, 33, 700, 1, 90, 2000]
    queries = [1, 1, 1, 1, 1, 20, 700, 1, 1, 100]
    for heads, kv_heads, dim, e4m3 in [(8, 2, 128, False), (7, 1, 64, False), (8, 8, 256, True), (8, 2, 80, True)]:
        batch = make_batch(
            lens, queries, heads=heads, kv_heads=kv_heads, dim=dim, e4m3=e4m3, dtype=torch.bfloat16, block_size=32
        )
        assert_close(batch)
        assert_close(batch, window=60)
        on_gpu = batch.to("cuda")
        few = on_gpu.attend(decodes=2)  # the rest of the decodes count as chunks of one
        assert error(few, reference(batch)) <= TOLERANCE[torch.bfloat16]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    decodes=st.lists(st.integers(0, 900), max_size=20),
    chunks=st.lists(st.tuples(st.integers(0, 1200), st.integers(1, 400)), max_size=9),
    block_size=st.sampled_from([8, 16, 32, 64]),
    shape=st.sampled_from([(4, 2, 64), (3, 3, 80), (8, 1, 128), (16, 2, 96), (7, 1, 256)]),
    e4m3=st.booleans(),
    window=st.sampled_from([0, 0, 33]),
    seed=st.integers(0, 99),
)
def test_any_mix_of_decodes_and_chunks(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    block_size: int,
    shape: tuple[int, int, int],
    e4m3: bool,
    window: int,
    seed: int,
) -> None:
    """Padding rows included: length 0, with and without a query."""
    lens = decodes + [length for length, _ in chunks]
    queries = [1] * len(decodes) + [min(n, length) for length, n in chunks]
    heads, kv_heads, dim = shape
    batch = make_batch(
        lens,
        queries,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        block_size=block_size,
        seed=seed,
        dtype=torch.bfloat16,
        e4m3=e4m3,
    )
    on_gpu = batch.to("cuda")
    out = on_gpu.attend(window, decodes=len(decodes))
    exact = reference(batch, window)
    assert out.isfinite().all()
    if exact.norm() > 0:
        assert error(out, exact) <= TOLERANCE[torch.bfloat16]


def test_padding() -> None:
    """Sequences of length 0 get zeros; tokens without a sequence are not written."""
    batch = make_batch([0, 30, 8, 0, 40], [3, 30, 0, 0, 10], dtype=torch.bfloat16)
    batch.q = torch.cat([batch.q, torch.full_like(batch.q[:5], NAN)])
    out = batch.to("cuda").attend()
    assert (out[:3] == 0).all()
    assert out[-5:].isnan().all()
    batch.q = batch.q[:-5]
    assert error(out[:-5], reference(batch)) <= TOLERANCE[torch.bfloat16]
    empty = make_batch([], [], dtype=torch.bfloat16).to("cuda")
    assert empty.attend().shape == (0, 4, 64)


def test_shared_blocks() -> None:
    """Three sequences read one copy of a 48-token prefix; results equal those of sequences that own all blocks."""
    batch = make_batch([60, 70, 49], [12, 22, 1], dim=128, dtype=torch.bfloat16)
    first, *others = batch.rows.tolist()
    for i, row in enumerate(others, 1):
        batch.tables[row, :3] = batch.tables[first, :3]
        batch.keys[i][:48] = batch.keys[0][:48]
        batch.values[i][:48] = batch.values[0][:48]
    assert_close(batch)


@pytest.mark.parametrize("dim", [96, 128])
def test_blocks_out_of_the_window_are_never_read(dim: int) -> None:
    """They may have been freed: their table entries are not even valid."""
    batch = make_batch([200, 390, 3000], [2, 10, 200], dim=dim, dtype=torch.bfloat16).to("cuda")
    before = batch.attend(window=20)
    for row, first in zip(batch.rows, (200 - 2, 390 - 10, 3000 - 200), strict=True):
        batch.tables[row, : (first + 1 - 20) // 16] = -1 << 20
    assert torch.equal(batch.attend(window=20), before)


@pytest.mark.parametrize("dim", [80, 128])
def test_nan_in_one_sequence_stays_there(dim: int) -> None:
    batch = make_batch([100, 300, 33], [4, 40, 3], dim=dim, dtype=torch.bfloat16).to("cuda")
    clean = batch.attend()
    batch.k_cache[batch.tables[batch.rows[1].long(), 0].long()] = NAN
    out = batch.attend()
    others = [*range(4), *range(44, 47)]
    assert torch.equal(out[others], clean[others])
    assert out[4:44].isnan().all()


def test_transposed_views() -> None:
    """transformers passes [1, H, T, D] viewed as [T, H, D], and q as a slice of a fused projection."""
    batch = make_batch([40, 17], [5, 17], dim=128, dtype=torch.bfloat16).to("cuda")
    expected = batch.attend()
    batch.q = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(batch.attend(), expected)
    batch.q = torch.cat([batch.q, torch.full_like(batch.q, NAN)], dim=-1)[..., :128]
    assert torch.equal(batch.attend(), expected)


@pytest.mark.parametrize("dim", [80, 128])
def test_same_lengths_same_bits(dim: int) -> None:
    """Parts are merged in a fixed order, whichever finishes last; and the plan serves any number of layers."""
    batch = make_batch([5000, 70, 2600], [9, 30, 40], heads=8, dim=dim, dtype=torch.bfloat16).to("cuda")
    first = batch.attend()
    for _ in range(20):
        assert torch.equal(batch.attend(), first)


def test_a_captured_plan_follows_lengths_that_change() -> None:
    """Plan and attention in a CUDA graph of fixed sizes, replayed for other lengths and fewer queries."""
    batch = make_batch([900, 0, 300], [40, 30, 30], dim=96, dtype=torch.bfloat16).to("cuda")
    lens, q_start = batch.lens.clone(), batch.q_start.clone()
    plan = torch.empty(
        ops.attention_plan_bytes(torch.device("cuda"), max_seqs=3, max_tokens=100, heads=4, kv_heads=2, head_size=96),
        dtype=torch.uint8,
        device="cuda",
    )
    out = torch.empty_like(batch.q)

    def step() -> None:
        ops.attention_plan(q_start, lens, 0, 4, 2, 96, 0, plan)
        for _ in range(3):
            ops.paged_attention(
                *(batch.q, batch.k_cache, batch.v_cache, batch.tables, batch.rows, q_start, lens),
                *(96**-0.5, 0, 0.0, out),
                plan=plan,
            )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new_lens, new_start in [
        ([900, 0, 300], [0, 40, 70, 100]),
        ([17, 0, 250], [0, 3, 3, 80]),
        ([0, 0, 1], [0, 1, 1, 2]),
    ]:
        lens.copy_(torch.tensor(new_lens, dtype=torch.int32))
        q_start.copy_(torch.tensor(new_start, dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        batch.lens, batch.q_start = lens, q_start
        expected = batch.attend(decodes=0)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
