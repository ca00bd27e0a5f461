"""All-reduce by one kernel.  Here the ranks are streams of one GPU, whose kernels run at the same time.

All CTAs of all ranks fit on the GPU at once, because they wait for each other.  No graphs: kernels of one rank that
start early could occupy the multiprocessors of another rank's.  test_cuda_rank_sum_gpus.py has two GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.engine.executor import ops
from tests.kernels.rank_sum_process import in_order

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]
CUDA = torch.device("cuda")
WORDS, BLOCKS = 16 << 10, 32 << 10  # bytes of part per CTA
EPS = 1e-5


class OnOneGpu:
    """`size` ranks, one stream each."""

    def __init__(self, size: int, words: int = WORDS, blocks: int = BLOCKS) -> None:
        own = [
            torch.zeros(ops.Inboxes.bytes_of(size, words, blocks), dtype=torch.uint8, device=CUDA) for _ in range(size)
        ]
        addresses = [inbox.data_ptr() for inbox in own]
        room = torch.cuda.get_device_properties(CUDA).multi_processor_count // size
        self.inboxes = [
            ops.Inboxes(
                inbox, addresses, torch.zeros(ops.SUM_CTAS, dtype=torch.int32, device=CUDA), rank, words, blocks, room
            )
            for rank, inbox in enumerate(own)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(size)]

    def sums(
        self, parts: Sequence[Tensor], *, words: bool, plus: Tensor | None = None, norm: Tensor | None = None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Results of each rank."""
        own = [part.clone() for part in parts]
        pluses = [None if plus is None else plus.clone() for _ in parts]
        for stream, part in zip(self.streams, parts, strict=True):
            with torch.cuda.stream(stream):
                torch.empty_like(part)  # the stream then has memory: taking some might wait for the kernels below
        torch.cuda.synchronize()
        found = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                found.append(
                    ops.rank_sum(own[rank], self.inboxes[rank], words=words, plus=pluses[rank], norm=norm, eps=EPS)
                )
        torch.cuda.synchronize()
        return found


def parts_of(size: int, rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(rows, width, device=CUDA).to(dtype) for _ in range(size)]


def check(ranks: OnOneGpu, parts: list[Tensor], *, words: bool, fused: bool = False) -> None:
    plus = torch.randn_like(parts[0]) if fused else None
    norm = torch.randn_like(parts[0][0]) if fused else None
    wanted = in_order(parts if plus is None else [*parts, plus])
    found = ranks.sums(parts, words=words, plus=plus, norm=norm)
    assert all(torch.equal(sums, wanted) for sums, _ in found)
    if norm is not None:
        exact = torch.nn.functional.rms_norm(wanted.double(), [wanted.shape[1]], norm.double(), EPS)
        first = found[0][1]
        assert first is not None
        torch.testing.assert_close(first.double(), exact, rtol=8 * torch.finfo(first.dtype).eps, atol=1e-6)
        assert all(normed is not None and torch.equal(normed, first) for _, normed in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_calls_of_all_sizes_in_turn(size: int, dtype: torch.dtype) -> None:
    """In an order that reuses parts of the inboxes after calls that skipped them, in both protocols."""
    ranks = OnOneGpu(size)
    for turn, rows in enumerate([1, 2, 7, 1, 33, 100, 1, 3, 64, 2] * 2):
        for width in (64, 96, 1024, 4096):
            words = turn % 3 != 1
            if ranks.inboxes[0].takes(rows, width, dtype, words=words):
                check(ranks, parts_of(size, rows, width, dtype), words=words, fused=turn % 2 == 0)


@pytest.mark.parametrize("width", [8, 16, 24, 264, 2048, 2056, 5120, 8192, 8200, 12288, 16384])
def test_rows_of_any_width(width: int) -> None:
    ranks = OnOneGpu(2, blocks=128 << 10)
    for rows in (1, 5):
        for words in (True, False):
            if ranks.inboxes[0].takes(rows, width, torch.bfloat16, words=words):
                check(ranks, parts_of(2, rows, width), words=words, fused=True)
    assert ranks.inboxes[0].takes(5, width, torch.bfloat16, words=False)


def test_many_rows_of_a_cta() -> None:
    ranks = OnOneGpu(2, blocks=128 << 10)
    for rows in (700, 1024, 999):
        check(ranks, parts_of(2, rows, 4096), words=False, fused=True)


def test_what_is_not_finite_arrives() -> None:
    ranks = OnOneGpu(2)
    parts = [torch.zeros(1, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
    parts[0][0, 3], parts[1][0, 9], parts[1][0, 20] = torch.nan, torch.inf, -torch.inf
    for words in (True, False):
        for sums, _ in ranks.sums(parts, words=words):
            assert sums[0, 3].isnan()
            assert sums[0, [9, 20]].tolist() == [torch.inf, -torch.inf]
            assert sums.isfinite().sum() == 61


def test_the_number_of_a_call_starts_again_without_the_one_of_an_unused_inbox() -> None:
    """0 marks unused inboxes, so no call has this number."""
    ranks = OnOneGpu(2)
    for inboxes in ranks.inboxes:
        inboxes.calls.fill_(-3)
    for turn in range(6):
        check(ranks, parts_of(2, 40, 1024), words=turn % 2 == 0)
    assert ranks.inboxes[0].calls[0] == 5  # -2, -1, then 2, 3, 4, 5


def test_wrong_arguments_are_named() -> None:
    inboxes = OnOneGpu(2).inboxes[0]
    part = torch.zeros(2, 64, device=CUDA)

    def refused(message: str, part: Tensor = part, **changes: object) -> None:
        rest = {name: changes.pop(name) for name in ("plus", "norm") if name in changes}
        with pytest.raises(ValueError, match=message):
            ops.rank_sum(part, replace(inboxes, **changes), words=True, **rest)  # type: ignore[arg-type]

    refused("rank: is 2 of 2", rank=2)
    refused("inboxes: 9 ranks, the maximum is 8", addresses=[0] * 9)
    refused("inboxes: that of rank 1 is not inbox", rank=1)
    refused("inbox: has", blocks_share=64 << 10)
    refused("shares: no multiples", words_share=17)
    refused("calls: counters is 3, kSumCtas has 256", calls=inboxes.calls[:3])
    refused("part: its rows of 3 elements", part=torch.zeros(2, 3, device=CUDA))
    refused("does not start at a multiple", part=torch.zeros(129, device=CUDA)[1:].view(2, 64))
    refused("plus: rows is 1, part has 2", plus=part[:1])
    refused("a CTA would send", part=torch.zeros(ops.SUM_CTAS * 4 + 1, 4096, device=CUDA))
