"""What ranks exchange on a CPU, each rank a thread of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.executor.ranks.ranks import Ranks

SIZE = 4


def of_all_ranks(meeting: Path, compute: Callable[[Ranks], Any]) -> list[Any]:
    """Return what each rank computes, in the order of ranks."""

    def run(rank: int) -> Any:
        ranks = Ranks.join(rank, SIZE, meeting, "cpu", 60.0)
        try:
            ranks.barrier()  # one that exchanges nothing would leave while others still connect to it
            return compute(ranks)
        finally:
            ranks.leave()

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


def part(rank: int, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 96, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch_and_on_all_ranks(tmp_path: Path, dtype: torch.dtype) -> None:
    """With more than two ranks the order of the sum matters."""

    def compute(ranks: Ranks) -> list[Tensor]:
        whole = part(ranks.rank, 37, dtype)
        return [ranks.all_reduce(whole[:rows].clone()) for rows in (37, 1, 2, 5, 19)]

    found = of_all_ranks(tmp_path / "meeting", compute)
    whole = found[0][0]
    in_order = [part(rank, 37, dtype) for rank in range(SIZE)]
    assert torch.equal(whole, ((in_order[0] + in_order[1]) + in_order[2]) + in_order[3])
    for sums in found:
        for each in sums:
            assert torch.equal(each, whole[: len(each)])


def test_the_largest_number_of_all_ranks(tmp_path: Path) -> None:
    def compute(ranks: Ranks) -> tuple[Tensor, Tensor]:
        mine = part(ranks.rank, 3)
        return mine, ranks.all_max(mine)

    found = of_all_ranks(tmp_path / "meeting", compute)
    wanted = torch.stack([part(rank, 3) for rank in range(SIZE)]).amax(0)
    for rank, (mine, largest) in enumerate(found):
        assert torch.equal(mine, part(rank, 3))  # not overwritten
        assert torch.equal(largest, wanted)


def test_columns_of_all_ranks(tmp_path: Path) -> None:
    wanted = torch.cat([part(rank, 5) for rank in range(SIZE)], 1)
    whole = wanted.shape[1]
    found = of_all_ranks(tmp_path / "meeting", lambda ranks: ranks.gather_columns(part(ranks.rank, 5), whole))
    assert all(torch.equal(each, wanted) for each in found)
    none = of_all_ranks(tmp_path / "other", lambda ranks: ranks.gather_columns(part(ranks.rank, 0), whole))
    assert all(each.shape == (0, whole) for each in none)


@pytest.mark.parametrize("left_out", [1, 96, 100])
def test_columns_that_are_padding_are_left_out(tmp_path: Path, left_out: int) -> None:
    """The last rank's end, all of it, and some of the rank before; into a tensor that has other columns, too."""
    wanted = torch.cat([part(rank, 5) for rank in range(SIZE)], 1)[:, :-left_out]

    def compute(ranks: Ranks) -> Tensor:
        whole = torch.full((5, wanted.shape[1] + 3), -1.0)
        out = ranks.gather_columns(part(ranks.rank, 5), wanted.shape[1], whole[:, :-3])
        assert out.data_ptr() == whole.data_ptr()
        return whole

    for whole in of_all_ranks(tmp_path / "meeting", compute):
        assert torch.equal(whole[:, :-3], wanted)
        assert whole[:, -3:].eq(-1).all()
