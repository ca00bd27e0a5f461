"""The sum of ranks' parts by one kernel.  Here the ranks are streams of one GPU, whose kernels run at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.executor import ops

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MOST = ops.SUM_CTAS * ops.SUM_SHARE


class Ranks:
    """`size` ranks on this GPU, a stream each."""

    def __init__(self, size: int, most_bytes: int = MOST) -> None:
        bytes_ = ops.one_shot_inbox_bytes(size, most_bytes)
        self._inboxes = [torch.zeros(bytes_, dtype=torch.uint8, device=CUDA) for _ in range(size)]
        self._addresses = [inbox.data_ptr() for inbox in self._inboxes]
        self.calls = [torch.zeros(ops.SUM_CTAS, dtype=torch.int32, device=CUDA) for _ in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        self._most_bytes = most_bytes
        torch.cuda.synchronize()

    def sum_on(self, rank: int, part: torch.Tensor) -> None:
        ops.one_shot_sum(part, self._addresses, self.calls[rank], rank, self._most_bytes)

    def sums(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What each rank finds."""
        found = [part.clone() for part in parts]
        torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                self.sum_on(rank, found[rank])
        torch.cuda.synchronize()
        return found


def in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts added in the order of ranks, in float32, and rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def check(ranks: Ranks, parts: Sequence[torch.Tensor]) -> None:
    wanted = in_order(parts)
    for found in ranks.sums(parts):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_sums_of_any_size_one_after_another(size: int, dtype: torch.dtype) -> None:
    """From 16 bytes to the most, in an order that uses shares of the inboxes anew after calls that left them out.

    All CTAs of all ranks must fit on this one GPU, since they wait for each other: hence smaller calls of 8 ranks."""
    ranks = Ranks(size)
    units = [1, 255, 256, 257, 5000, MOST // 16, 1, 2, 3, 10_007, 4096, 1, MOST // 16 - 1, MOST // 16]
    for count in [count for count in units * 3 if size <= 4 or count <= 5000]:
        parts = [torch.randn(count * 16 // dtype.itemsize, device=CUDA).to(dtype) for _ in range(size)]
        check(ranks, parts)


def test_larger_inboxes() -> None:
    ranks = Ranks(2, 4 * MOST)
    for rows in (1, 17, 128, 3):
        check(ranks, [torch.randn(rows, 4096, device=CUDA, dtype=torch.bfloat16) for _ in range(2)])


def test_what_is_not_finite_arrives() -> None:
    ranks = Ranks(2)
    parts = [torch.zeros(64, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
    parts[0][3], parts[1][9], parts[1][20] = torch.nan, torch.inf, -torch.inf
    for found in ranks.sums(parts):
        assert found[3].isnan()
        assert found[[9, 20]].tolist() == [torch.inf, -torch.inf]
        assert found.isfinite().sum() == 61


def test_in_graphs_with_kernels_around() -> None:
    """Each rank's graph holds several sums, whose parts the kernel in front writes and the next one reads."""
    ranks, steps = Ranks(2), 20
    weights = [torch.randn(256, 256, device=CUDA, dtype=torch.bfloat16) / 16 for _ in range(2)]
    starts = [torch.randn(3, 256, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]

    def layers(rank: int, x: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            x = ops.linear(x, weights[rank])
            ranks.sum_on(rank, x)
        return x

    with torch.cuda.stream(ranks.streams[0]):  # compiles nothing later, while another rank waits
        ops.linear(starts[0], weights[0])
    torch.cuda.synchronize()
    graphs, outs = [], []
    for rank in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            outs.append(layers(rank, starts[rank]))
        graphs.append(graph)
    xs = list(starts)
    for _ in range(steps):
        total = in_order([ops.linear(x, weight) for x, weight in zip(xs, weights, strict=True)])
        xs = [total, total]
    for _ in range(3):
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(ranks.streams[rank]):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, xs[0]) for out in outs)


def test_the_number_of_a_call_starts_again_without_the_one_of_an_unused_inbox() -> None:
    """0 stands in inboxes that were never used, so a call never has it."""
    ranks = Ranks(2)
    for calls in ranks.calls:
        calls.fill_(-3)
    for _ in range(6):
        check(ranks, [torch.randn(40_000, device=CUDA, dtype=torch.bfloat16) for _ in range(2)])
    assert ranks.calls[0][0] == 5  # -2, -1, then 2, 3, 4, 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"part": torch.zeros(4, device="cuda:0")[1:]} if torch.cuda.is_available() else {}, "part: its 12 bytes"),
        ({"rank": 2}, "rank: is 2 of 2"),
        ({"most_bytes": 1000}, "most_bytes: 1000 is no multiple of 262144"),
        ({"inboxes": [0] * 9}, "inboxes: 9 ranks, the most are 8"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, object], message: str) -> None:
    arguments = {
        "part": torch.zeros(8, device=CUDA),
        "inboxes": [0, 0],
        "calls": torch.zeros(ops.SUM_CTAS, dtype=torch.int32, device=CUDA),
        "rank": 0,
        "most_bytes": MOST,
    }
    with pytest.raises(ValueError, match=message):
        ops.one_shot_sum(**arguments | changed)  # type: ignore[arg-type]


def test_more_than_the_most_is_refused() -> None:
    ranks = Ranks(2)
    with pytest.raises(ValueError, match="part: has 262160 bytes, the most are 262144"):
        ranks.sum_on(0, torch.zeros(MOST // 4 + 4, device=CUDA))
