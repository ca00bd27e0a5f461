"""paged_attention on a GPU: sequences with one query each, against a float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.executor import ops
from tests.kernels.paged import NAN, Batch, check_sinks, error, make_batch, reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
# Queries, keys and values are exact in both.  Softmax weights are rounded to the dtype before P V (fp16 with an e4m3
# cache), and so is the output.  Measured over these tests: at most 2.3e-3 and 2.8e-4.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def decodes(lens: list[int], **shape: object) -> Batch:
    return make_batch(lens, [1] * len(lens), **shape)  # type: ignore[arg-type]


def assert_close(batch: Batch, window: int = 0, soft_cap: float = 0.0, scale: float | None = None) -> None:
    exact = reference(batch, window, soft_cap, scale)
    out = batch.to("cuda").attend(window, soft_cap, scale)
    assert error(out, exact) <= TOLERANCE[batch.q.dtype]


LENS = [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 0, 128, 511, 512, 513, 0, 1000, 3000]


@pytest.mark.parametrize("e4m3", [False, True], ids=["", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_every_head_size_and_dtype(dtype: torch.dtype, dim: int, e4m3: bool) -> None:
    assert_close(decodes(LENS, dim=dim, dtype=dtype, e4m3=e4m3))
    assert_close(decodes(LENS, dim=dim, dtype=dtype, e4m3=e4m3, heads=12, kv_heads=1), window=100, soft_cap=5.0)


@pytest.mark.parametrize("e4m3", [False, True], ids=["", "e4m3"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (5, 1), (14, 2), (32, 2), (71, 1), (1, 1), (40, 40)])
def test_every_block_size_and_head_grouping(block_size: int, heads: int, kv_heads: int, e4m3: bool) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": 128, "block_size": block_size}
    assert_close(decodes([1, 40, 300, 64, 190], dtype=torch.bfloat16, e4m3=e4m3, **shape))


@pytest.mark.parametrize("soft_cap", [0.0, 5.0, 50.0])
@pytest.mark.parametrize("window", [0, 1, 16, 100, 300, 5000])
def test_window_and_soft_cap(window: int, soft_cap: float) -> None:
    """Scores of both signs up to about 20, so that the cap matters."""
    assert_close(decodes([700, 20, 257, 1, 2000], spread=4.0, dim=128, dtype=torch.float16), window, soft_cap)


@pytest.mark.parametrize("e4m3", [False, True], ids=["", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_sinks(dtype: torch.dtype, dim: int, e4m3: bool) -> None:
    """Two dominant sinks, a negligible one, and others in between; keys of one warp, of several CTAs, of none.

    A head group of 12 heads, so that some mma columns are unused."""
    batch = decodes([*LENS, 20000], dim=dim, dtype=dtype, e4m3=e4m3, heads=24, kv_heads=2)
    check_sinks(batch, TOLERANCE[dtype])
    check_sinks(batch, TOLERANCE[dtype], window=100, soft_cap=5.0)


def test_sinks_above_all_scores_leave_nothing() -> None:
    batch = decodes([300, 5, 20000], dtype=torch.bfloat16).to("cuda")
    for sink in (100.0, 1e4, torch.inf):
        assert batch.attend(sinks=torch.full([4], sink)).abs().max() < 1e-30
    assert torch.equal(batch.attend(sinks=torch.full([4], -torch.inf)), batch.attend())


def test_sinks_of_the_wrong_number_type_or_device() -> None:
    batch = decodes([5], dtype=torch.bfloat16).to("cuda")
    for sinks in (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="sinks"):
            batch.attend(sinks=sinks)


def test_scale_is_applied() -> None:
    assert_close(decodes([50, 9], dtype=torch.float16), scale=0.7)


@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads"),
    [
        ([32768], 8, 2),  # many CTAs share a head group
        ([131072], 4, 1),
        ([20000, 3, 9000, 0, 0, 700], 8, 2),
        ([900] * 70, 32, 8),  # shares hold complete head groups
        ([100] * 1024, 8, 8),
        ([1 + 37 * i % 400 for i in range(500)], 8, 4),
        ([32768] + [512] * 31, 32, 8),
        # Parts that end at head group borders: of one head group, of several, and empty ones.
        ([64 + 45 * i % 640 for i in range(8)], 32, 8),
        ([500 + 61 * i % 1000 for i in range(16)], 32, 8),
        ([64 + 45 * i % 640 for i in range(40)], 32, 8),
        ([16 * tiles for tiles in [83, 18, 10, 23, 83, 47, 6, 8, 39, 6, 46, 62, 37, 70, 5, 80, 67]], 32, 8),
        ([16 * tiles for tiles in (3, 90, 4, 88, 5, 86, 7, 90, 2) * 3], 32, 8),
    ],
)
def test_work_is_shared_out(lens: list[int], heads: int, kv_heads: int) -> None:
    assert_close(decodes(lens, heads=heads, kv_heads=kv_heads, dim=64, dtype=torch.bfloat16))


def test_nothing_to_do() -> None:
    assert_close(decodes([0, 0, 5], dtype=torch.bfloat16))
    batch = decodes([0, 0], dtype=torch.bfloat16).to("cuda")
    assert torch.equal(batch.attend(), torch.zeros_like(batch.q))


def test_the_same_every_time_and_in_a_graph() -> None:
    """The last CTA to finish merges, and idle CTAs take more items, but the order of sums does not depend on it."""
    batch = decodes([9000, 700, 700, 0, 5000] + [300] * 40, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16).to(
        "cuda"
    )
    seqs = len(batch.rows)
    size = ops.attention_plan_bytes(batch.q.device, max_seqs=seqs, max_tokens=seqs, heads=32, kv_heads=8, head_size=128)
    plan = torch.zeros(size, dtype=torch.uint8, device="cuda")
    out = torch.full_like(batch.q, NAN)

    def step() -> None:
        ops.attention_plan(batch.q_start, batch.lens, seqs, 32, 8, 128, 0, plan)
        for _ in range(3):  # layers
            ops.paged_attention(
                batch.q, batch.k_cache, batch.v_cache, batch.tables, batch.rows, batch.q_start, batch.lens,
                128**-0.5, 0, 0.0, out, decodes=seqs, plan=plan,
            )  # fmt: skip

    step()
    first = out.clone()
    assert error(first, reference(batch)) <= TOLERANCE[torch.bfloat16]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, first)
    # The graph reads lengths when it runs.
    batch.lens.copy_(torch.tensor([100, 0, 650, 0, 4999] + [299] * 40))
    graph.replay()
    assert error(out, reference(batch)) <= TOLERANCE[torch.bfloat16]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lens=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3000)), min_size=1, max_size=40),
    block_size=st.sampled_from([8, 16, 32, 64]),
    shape=st.sampled_from(
        [(4, 2, 64), (3, 3, 80), (8, 1, 128), (16, 2, 96), (7, 1, 256), (5, 1, 192), (32, 1, 128), (10, 2, 128)]
    ),
    e4m3=st.booleans(),
    window=st.sampled_from([0, 0, 33, 1000]),
    seed=st.integers(0, 99),
)
def test_any_lengths(
    lens: list[int], block_size: int, shape: tuple[int, int, int], e4m3: bool, window: int, seed: int
) -> None:
    heads, kv_heads, dim = shape
    batch = decodes(
        [*lens, 1],
        heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, e4m3=e4m3, seed=seed, dtype=torch.bfloat16,
    )  # fmt: skip
    assert_close(batch, window)


def test_blocks_shared_by_sequences() -> None:
    """A common prefix: two rows of the table contain the same blocks."""
    batch = decodes([64, 80, 64], block_size=16, dim=128, dtype=torch.bfloat16)
    a, b = int(batch.rows[0]), int(batch.rows[2])
    batch.tables[b, :4] = batch.tables[a, :4]
    batch.keys[2], batch.values[2] = batch.keys[0], batch.values[0]
    assert_close(batch)


def test_strided_queries_and_outputs() -> None:
    """As in a layer: queries are columns of a fused projection."""
    batch = decodes([300, 17, 1000], heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16)
    exact = reference(batch)
    merged = torch.full((3, 12, 64), NAN, dtype=torch.bfloat16)
    merged[:, :8] = batch.q
    batch.q = merged[:, :8]
    on_gpu = batch.to("cuda")
    on_gpu.q = merged.cuda()[:, :8]
    assert error(on_gpu.attend(), exact) <= TOLERANCE[torch.bfloat16]


def test_what_the_bindings_refuse() -> None:
    batch = decodes([30], dim=64, dtype=torch.bfloat16).to("cuda")
    plan = torch.zeros(16, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="plan: has 16 bytes"):
        ops.attention_plan(batch.q_start, batch.lens, 1, 4, 2, 64, 0, plan)
    with pytest.raises(ValueError, match="head size 72 is not"):
        ops.attention_plan(batch.q_start, batch.lens, 1, 4, 2, 72, 0, plan)
    with pytest.raises(ValueError, match="decodes: 2 of 1"):
        batch.attend(decodes=2)
    with pytest.raises(ValueError, match="q: dtype is Float, attention on a GPU needs bfloat16 or float16"):
        decodes([30], dim=64).to("cuda").attend()
    with pytest.raises(ValueError, match="block size 4 is not"):
        decodes([30], dim=64, block_size=4, dtype=torch.bfloat16).to("cuda").attend()
