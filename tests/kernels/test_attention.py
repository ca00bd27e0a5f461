"""paged_attention on a CPU against a float64 reference, and the bit-identity that its docstring guarantees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.paged import NAN, Batch, error, make_batch, reference
from tests.matrix import examples


def assert_close(batch: Batch, **kwargs: float) -> None:
    """Check that our error is at most plain torch's in the same precision: float32 sums, one rounding at the end.

    Measured over these tests, ours is 0.3 to 1.3 times plain torch's.  That is 1e-7 to 5e-7 in float32, 2e-4 in float16
    and 2e-3 in bfloat16, where the rounding of the output dominates.  The constant is one ulp of float32, for cases
    in which plain torch happens to be exact.
    """
    exact = reference(batch, **kwargs)  # type: ignore[arg-type]
    plain = reference(batch, **kwargs, compute=torch.float32, store=batch.q.dtype)  # type: ignore[arg-type]
    noise = error(plain, exact)
    ours = error(batch.attend(**kwargs), exact)  # type: ignore[arg-type]
    assert ours <= 2 * noise + 1e-7


LENS = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 700]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 16, 32, 40, 64, 80, 96, 128, 256, 320, 512])
def test_decode_equals_reference(dtype: torch.dtype, dim: int) -> None:
    assert_close(make_batch(LENS, [1] * len(LENS), dim=dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 16, 32, 40, 64, 80, 96, 128, 256, 320, 512])
def test_prefill_equals_reference(dtype: torch.dtype, dim: int) -> None:
    assert_close(make_batch(LENS, [-(-n // 2) for n in LENS], dim=dim, dtype=dtype))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 2), (8, 1), (71, 1), (1, 1)])
def test_every_block_size_and_head_grouping(block_size: int, heads: int, kv_heads: int) -> None:
    """71 query heads on one KV head (falcon-7b) exceed one work item."""
    lens, queries = [1, 40, 300, 64, 90], [1, 40, 1, 3, 17]
    assert_close(make_batch(lens, queries, heads=heads, kv_heads=kv_heads, dim=32, block_size=block_size))


@pytest.mark.parametrize("soft_cap", [0.0, 5.0, 50.0])
@pytest.mark.parametrize("window", [0, 1, 16, 100, 300, 5000])
def test_window_and_soft_cap(window: int, soft_cap: float) -> None:
    """Scores of both signs up to about 20, so that the cap matters, and keys of several splits outside the window."""
    batch = make_batch([700, 20, 257, 1], [150, 1, 1, 1], spread=4.0)
    assert_close(batch, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 40, 64, 128, 512])
def test_e4m3_cache(dtype: torch.dtype, dim: int) -> None:
    """Decodes and chunks, with a scale per head for keys and for values."""
    batch = make_batch(LENS, [1 if n % 2 else -(-n // 2) for n in LENS], dim=dim, dtype=dtype, e4m3=True, block_size=8)
    assert_close(batch)
    assert_close(batch, window=50, soft_cap=5.0)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (50, 5.0)])
def test_sinks(window: int, soft_cap: float, dtype: torch.dtype, e4m3: bool) -> None:
    """A dominant sink, a negligible one, and two in between; decodes, chunks and merged splits."""
    batch = make_batch(LENS, [1 if n % 2 else -(-n // 2) for n in LENS], dtype=dtype, e4m3=e4m3)
    sinks = torch.tensor([8.0, -torch.inf, 0.5, -2.0])
    exact = reference(batch, window, soft_cap, sinks=sinks)
    plain = reference(batch, window, soft_cap, sinks=sinks, compute=torch.float32, store=dtype)
    ours = batch.attend(window, soft_cap, sinks=sinks)
    assert error(ours, exact) <= 2 * error(plain, exact) + 1e-7
    assert torch.equal(ours[:, 1], batch.attend(window, soft_cap)[:, 1])


@pytest.mark.parametrize("sink", [100.0, 1e4, torch.inf])
def test_a_sink_above_all_scores_leaves_nothing(sink: float) -> None:
    assert make_batch([300, 5], [1, 5]).attend(sinks=torch.full([4], sink)).abs().max() < 1e-30


def test_sinks_of_the_wrong_number_or_type() -> None:
    batch = make_batch([5], [1])
    with pytest.raises(ValueError, match="sinks"):
        batch.attend(sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="sinks"):
        batch.attend(sinks=torch.zeros(4, dtype=torch.bfloat16))


def test_scale_is_applied() -> None:
    assert_close(make_batch([50, 9], [1, 9]), scale=0.7)


def test_empty_sequences_and_empty_call() -> None:
    batch = make_batch([0, 30, 8, 0], [0, 30, 0, 0])
    assert_close(batch)
    without_keys = make_batch([0, 30, 0], [1, 30, 4])
    assert_close(without_keys)
    assert (without_keys.attend()[[0, 31, 34]] == 0).all()
    assert make_batch([], []).attend().shape == (0, 4, 64)
    assert make_batch([8], [0]).attend().shape == (0, 4, 64)


@settings(max_examples=examples(60), deadline=None)
@given(
    seqs=st.lists(st.tuples(st.integers(1, 600), st.integers(1, 90)), min_size=1, max_size=9),
    block_size=st.sampled_from([8, 16, 32, 64]),
    shape=st.sampled_from([(4, 2, 64), (3, 3, 80), (8, 1, 16)]),
    window=st.sampled_from([0, 0, 33]),
    seed=st.integers(0, 99),
)
def test_any_mix_of_decodes_and_chunks(
    seqs: list[tuple[int, int]], block_size: int, shape: tuple[int, int, int], window: int, seed: int
) -> None:
    lens, queries = [length for length, _ in seqs], [min(n, length) for length, n in seqs]
    heads, kv_heads, dim = shape
    batch = make_batch(lens, queries, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, seed=seed)
    assert_close(batch, window=window)


def test_shared_blocks() -> None:
    """Three sequences read one copy of a 48-token prefix; results equal those of sequences that own all blocks."""
    batch = make_batch([60, 70, 49], [1, 22, 1])
    first, *others = batch.rows.tolist()
    for i, row in enumerate(others, 1):
        batch.tables[row, :3] = batch.tables[first, :3]
        batch.keys[i][:48] = batch.keys[0][:48]
        batch.values[i][:48] = batch.values[0][:48]
    assert_close(batch)


def test_blocks_out_of_the_window_are_never_read() -> None:
    """They may have been freed: their table entries are not even valid."""
    batch = make_batch([200, 90], [1, 10])
    before = batch.attend(window=20)
    batch.tables[batch.rows[0], : (200 - 20) // 16] = -1
    batch.tables[batch.rows[1], : (90 - 10 + 1 - 20) // 16] = -1
    assert torch.equal(batch.attend(window=20), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_one_sequence_stays_there(dtype: torch.dtype) -> None:
    batch = make_batch([100, 300, 33], [1, 40, 1], dtype=dtype)
    clean = batch.attend()
    batch.k_cache[batch.tables[batch.rows[1], 0]] = NAN
    out = batch.attend()
    assert torch.equal(out[[0, 41]], clean[[0, 41]])
    assert out[1:41].isnan().all()


def test_transposed_views() -> None:
    """transformers passes [1, H, T, D] viewed as [T, H, D], and q as a slice of a fused projection."""
    batch = make_batch([40, 17], [5, 17])
    expected = batch.attend()
    batch.q = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not batch.q.is_contiguous()
    assert torch.equal(batch.attend(), expected)
    batch.q = torch.cat([batch.q, torch.full_like(batch.q, NAN)], dim=-1)[..., :64]
    assert torch.equal(batch.attend(), expected)


# Bit-identity guaranteed by the docstring.


def mixed(dtype: torch.dtype = torch.bfloat16) -> Batch:
    """33 sequences, decodes and chunks, lengths on both sides of every boundary inside the kernel."""
    lens = [1 + 37 * i % 900 for i in range(31)] + [3000, 256]
    return make_batch(lens, [1 if i % 3 else min(n, 50) for i, n in enumerate(lens)], dtype=dtype)


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (70, 30.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_does_not_depend_on_the_batch(dtype: torch.dtype, window: int, soft_cap: float) -> None:
    batch = mixed(dtype)
    together = batch.attend(window, soft_cap)
    for s in range(len(batch.rows)):
        begin, end = batch.q_start[s : s + 2].tolist()
        assert torch.equal(batch.only(s).attend(window, soft_cap), together[begin:end]), f"sequence {s}"


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("heads", [2, 8, 71])
def test_result_does_not_depend_on_chunks(heads: int, window: int) -> None:
    batch = make_batch([600], [600], heads=heads, kv_heads=2 if heads % 2 == 0 else 1, dim=32)
    whole = batch.attend(window)
    for size in (1, 7, 64, 512):
        for begin in range(0, 600, size):
            part = batch.only(0, slice(begin, begin + size)).attend(window)
            assert torch.equal(part, whole[begin : begin + size]), f"chunks of {size} at {begin}"


def test_result_does_not_depend_on_threads() -> None:
    batch, long = mixed(), make_batch([5000], [2])
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            results.append((batch.attend(), long.attend()))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])
        assert torch.equal(result[1], results[0][1])


def test_result_does_not_depend_on_where_blocks_lie_or_their_size() -> None:
    lens, queries = [300, 40, 77], [1, 40, 20]
    results = []
    for block_size in (8, 16, 32, 64):
        batch = make_batch(lens, queries, block_size=block_size)
        results.append(batch.attend())
        order = torch.randperm(len(batch.k_cache), generator=torch.Generator().manual_seed(1))
        batch.k_cache, batch.v_cache = batch.k_cache[order], batch.v_cache[order]
        batch.tables = torch.where(batch.tables >= 0, order.argsort()[batch.tables.long()].int(), batch.tables)
        results.append(batch.attend())
    for result in results[1:]:
        assert torch.equal(result, results[0])


# Errors of the bindings.


@pytest.mark.parametrize(
    ("field", "change", "kind", "message"),
    [
        ("k_cache", lambda t: t[..., :32].contiguous(), ValueError, "k_cache: head size is 32, q has 64"),
        ("v_cache", lambda t: t[:, :1], ValueError, "v_cache: KV heads is 1, k_cache has 2"),
        ("v_cache", lambda t: t.half(), ValueError, "v_cache: dtype is Half, q has Float"),
        ("k_cache", lambda t: t.transpose(2, 3), ValueError, "k_cache: "),
        ("q", lambda t: t[:, :3], ValueError, "q: 3 heads are not a multiple of k_cache's 2"),
        ("q", lambda t: t[:-1], ValueError, "q_start: runs from 0 to 6, q has 5 tokens"),
        ("q", lambda t: t.double(), ValueError, "dtype is Float, q has Double"),
        ("q", lambda t: t[0], ValueError, "q: has 2 dimensions, not 3"),
        ("rows", lambda t: t.long(), ValueError, "rows: dtype is Long, this operator needs Int"),
        ("rows", lambda t: t + 9, IndexError, "tables have 4 rows"),
        ("lens", lambda t: t[:1], ValueError, "lens: sequences is 1, rows has 2"),
        ("lens", lambda t: t // 5, ValueError, r"lens\[1\] is 1, less than its 5 queries"),
        ("lens", lambda t: t + 999, ValueError, "tables hold 3 blocks of 16"),
        ("q_start", lambda t: t[:-1], ValueError, "q_start: has 2 entries for 2 sequences"),
        ("tables", lambda t: t + 99, IndexError, "the cache has 6 blocks"),
        ("tables", lambda t: t * 0 - 1, IndexError, "is -1, the cache has 6 blocks"),
        ("scales", lambda t: torch.ones(2, 2), ValueError, "scales: given for a cache of Float"),
    ],
)
def test_what_does_not_fit_is_refused(field: str, change: object, kind: type[Exception], message: str) -> None:
    batch = make_batch([20, 5], [1, 5])
    assert callable(change)
    setattr(batch, field, change(getattr(batch, field)))
    with pytest.raises(kind, match=message):
        batch.attend()
