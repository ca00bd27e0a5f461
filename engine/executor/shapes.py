"""Sizes of steps with slices, and the few that have CUDA graphs: a step is padded to one of these."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Shape(NamedTuple):
    """How large the tensors of a step with slices are."""

    decodes: int  # slots that decode, one token each
    tokens: int  # number of tokens in all slices
    slices: int
    samples: int  # slots that sample
    logits: int  # wanted, of theirs and of targets

    @property
    def total(self) -> int:
        """Tokens of the step.  Its time grows with them, whether they decode or belong to slices."""
        return self.decodes + self.tokens

    def holds(self, other: Shape) -> bool:
        """Whether padding makes `other` this."""
        return (
            self.decodes >= other.decodes
            and self.tokens >= other.tokens
            and self.slices >= other.slices
            and self.samples >= other.samples
            and self.logits >= other.logits
        )


class Shapes:
    """A set of shapes, found by size in a few microseconds."""

    def __init__(self, shapes: Iterable[Shape] = ()) -> None:
        self._all = sorted(set(shapes), key=lambda shape: (shape.total, shape))
        self._totals = [shape.total for shape in self._all]
        self._known = frozenset(self._all)

    def padded(self, exact: Shape) -> Shape:
        """Return the shape that holds this one with the fewest tokens to compute; this one if none holds it."""
        for at in range(bisect_left(self._totals, exact.total), len(self._all)):
            if self._all[at].holds(exact):
                return self._all[at]
        return exact

    def is_split(self, shape: Shape) -> bool:
        """Return whether attention takes each token of this shape's slices for a sequence of its own.

        So do shapes of a few drafts, which have as many slices as tokens.  The keys are read once for each token,
        mostly from the L2 cache.  For up to 16 tokens that takes less time than the kernel of longer slices: 9 us in
        place of 17 for 8 tokens behind 512 keys, on an H200."""
        return shape.slices == shape.tokens and shape in self._known

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._known

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
