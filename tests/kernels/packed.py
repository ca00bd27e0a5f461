"""Calls packed linear layers of a CPU with tensors that the wrapper does not pass, such as parts of larger ones."""

from __future__ import annotations

import torch

from quire.engine.executor import ops


def into(out: torch.Tensor, x: torch.Tensor, packed: ops.Packed) -> None:
    """Write x times the packed weight, transposed, to `out`."""
    scale, zero = packed.scale, packed.zero
    torch.ops.quire.packed_linear.default(x, packed.values, scale, zero, None, None, 0.0, False, False, None, out)
