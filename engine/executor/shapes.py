"""Sizes of steps with slices.  A few of them have CUDA graphs, and a step is padded to one of these."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes of the tensors of a step with slices."""

    decodes: int  # slots that decode, one token each
    tokens: int  # number of tokens in all slices
    slices: int
    samples: int  # slots that sample
    logits: int  # rows of logits: of sampling slots, candidates, drafts and targets

    @property
    def total(self) -> int:
        """All tokens of the step, of decodes and slices; they determine its duration."""
        return self.decodes + self.tokens

    def holds(self, other: Shape) -> bool:
        """Whether `other` can be padded to this shape."""
        return (
            self.decodes >= other.decodes
            and self.tokens >= other.tokens
            and self.slices >= other.slices
            and self.samples >= other.samples
            and self.logits >= other.logits
        )


class Shapes:
    """A set of shapes; a look-up by size takes a few microseconds."""

    def __init__(self, shapes: Iterable[Shape] = ()) -> None:
        self._all = sorted(set(shapes), key=lambda shape: (shape.total, shape))
        self._totals = [shape.total for shape in self._all]
        self._known = frozenset(self._all)

    def padded(self, exact: Shape) -> Shape:
        """Return the shape with the fewest tokens that `exact` can be padded to; `exact` if there is none."""
        for at in range(bisect_left(self._totals, exact.total), len(self._all)):
            if self._all[at].holds(exact):
                return self._all[at]
        return exact

    def is_split(self, shape: Shape) -> bool:
        """Return whether attention treats each token of this shape's slices as a sequence of its own.

        That holds for shapes of a few drafts, which have as many slices as tokens.  Each token then reads the keys
        again, mostly from the L2 cache.  For up to 16 tokens this is faster than the kernel for longer slices:
        attention of 8 tokens after 512 keys takes 9 us (17 us with that kernel) on an H200."""
        return shape.slices == shape.tokens and shape in self._known

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._known

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
