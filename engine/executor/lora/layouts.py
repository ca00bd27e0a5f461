"""Layouts of an adapter's matrices in memory, one for the CPU's kernels and one for the GPU's.  Numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.engine.executor import ops

Numbers = npt.NDArray[np.generic]
MAX_RANKS = 128  # maximum rank, as in `engine/adapters`


class Layout(Protocol):
    """Storage of A [ranks, in] of all layers of a site, joined, and of B [out, ranks] of one layer."""

    @property
    def max_ranks(self) -> int:
        """Return the maximum rank of a layer."""

    def with_ranks(self, matrix: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return A of one layer, padded to the layout's multiple of ranks."""

    def shrink(self, matrix: Numbers) -> Numbers:
        """Return A in its stored form, flat."""

    def expand(self, matrix: Numbers) -> Numbers:
        """Return B in its stored form, flat."""


@dataclass(frozen=True)
class Strips:
    """The layout of the CPU's GEMM (`ops.packed_layout`), padded with zeros."""

    columns: int  # columns per strip
    together: int  # adjacent inputs per column

    @property
    def max_ranks(self) -> int:
        return MAX_RANKS

    def with_ranks(self, matrix: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return matrix

    def shrink(self, matrix: Numbers) -> Numbers:
        out, inner = matrix.shape
        padded = np.pad(matrix, ((0, -out % self.columns), (0, -inner % self.together)))
        strips = padded.reshape(-1, self.columns, padded.shape[1] // self.together, self.together)
        return np.ascontiguousarray(strips.transpose(0, 2, 1, 3)).reshape(-1)

    expand = shrink


@dataclass(frozen=True)
class GpuBlocks:
    """The packed blocks of csrc/cuda/lora/lora.h, each 32 lanes times 16 elements, padded with zeros."""

    max_rank: int

    @property
    def max_ranks(self) -> int:
        return self.max_rank

    def with_ranks(self, matrix: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.pad(matrix, ((0, -len(matrix) % ops.LORA_RANKS), (0, 0)))

    def shrink(self, matrix: Numbers) -> Numbers:
        """Return A in blocks of 16 ranks and 32 inputs: lane 4 g + t has inputs 8 t .. 8 t + 7 of ranks g and g + 8."""
        padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % ops.LORA_INPUTS)))
        #                        blocks, half, g,         blocks, t, inputs
        lanes = padded.reshape(-1, 2, 8, padded.shape[1] // ops.LORA_INPUTS, 4, 8)
        return np.ascontiguousarray(lanes.transpose(0, 3, 2, 4, 1, 5)).reshape(-1)

    def expand(self, matrix: Numbers) -> Numbers:
        """Return B in blocks of 32 features and 16 ranks: lane 4 g + t has ranks 4 t .. 4 t + 3 of the features
        8 (g / 2) + 2 j + g % 2, for j from 0 to 3."""
        out, ranks = matrix.shape
        padded = np.pad(matrix, ((0, -out % ops.LORA_FEATURES), (0, -ranks % ops.LORA_RANKS)))
        #                        blocks, g / 2, j, g % 2,  blocks, t, ranks
        lanes = padded.reshape(-1, 4, 4, 2, padded.shape[1] // ops.LORA_RANKS, 4, 4)
        return np.ascontiguousarray(lanes.transpose(0, 4, 1, 3, 5, 2, 6)).reshape(-1)

    def elements(self, inputs: int, outputs: list[int]) -> int:
        """Return the number of elements of A and B of a target module at the maximum rank."""
        ranks = -(-self.max_rank // ops.LORA_RANKS) * ops.LORA_RANKS
        a = len(outputs) * (-(-inputs // ops.LORA_INPUTS) * ops.LORA_INPUTS)
        return ranks * (a + sum(-(-size // ops.LORA_FEATURES) * ops.LORA_FEATURES for size in outputs))
