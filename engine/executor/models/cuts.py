"""The shard of a parameter that a rank holds, and how it is read from a file without the rest.

Cut(-2, 4, 8)               rows 4 to 7 of [.., out, in]
Cut(-1, 4, 8)               columns 4 to 7
Cut(-2, 4, 8, halves=2)     rows 4 to 7 of gate and of up, which are one parameter: two slices
Cut(-1, 4, 8, halves=3)     columns 4 to 7 of q, of k and of v
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

Where = tuple[slice, ...]  # an index for each dimension


@dataclass(frozen=True)
class Cut:
    """The shard of a parameter that a rank holds."""

    dim: int  # -1 or -2
    first: int
    end: int  # past the last
    halves: int = 1  # number of equal tensors joined along `dim`; the cut applies to each
    padding: int = 0  # zeros after the shard

    @property
    def size(self) -> int:
        """Length of the part along `dim`."""
        return self.halves * (self.end - self.first) + self.padding

    def pieces(self, shape: tuple[int, ...]) -> list[Where]:
        """Return the slices of the shard in a parameter of this shape, one per joined tensor."""
        dim = len(shape) + self.dim
        whole = [slice(0, size) for size in shape]
        starts = range(0, shape[dim], shape[dim] // self.halves)
        places = [slice(start + self.first, start + self.end) for start in starts]
        return [(*whole[:dim], place, *whole[dim + 1 :]) for place in places]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the shard made of these slices, with its padding."""
        last = pieces[-1]
        if self.padding:
            shape = list(last.shape)
            shape[self.dim] = self.padding
            pieces = [*pieces, last.new_zeros(shape)]
        return torch.cat(list(pieces), self.dim) if len(pieces) > 1 else last.contiguous()

    def take(self, stored: Any, shape: tuple[int, ...]) -> Tensor:
        """Return the shard of a tensor.  From a lazy slice of a file only the shard is read."""
        return self.join([stored[where] for where in self.pieces(shape)])


@dataclass(frozen=True)
class StoredPart:
    """The shard of a tensor in a file, read when it is indexed as `part[...]`."""

    stored: Any
    shape: tuple[int, ...]
    cut: Cut

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        return self.cut.take(self.stored, self.shape)


def part_of(stored: Any, shape: tuple[int, ...], cut: Cut | None) -> Any:
    """Return a tensor of a file, or a rank's shard of it, which is read when it is indexed."""
    return stored if cut is None else StoredPart(stored, shape, cut)
