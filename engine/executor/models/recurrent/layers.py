"""What layers with recurrent state are made of: a causal convolution, and a linear recurrence.

A step packs T tokens of S sequences.  Both operators read and update the live state of each sequence's slot, and give a
token the same bits in any batch and any chunking of its prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.executor import ops
from quire.engine.executor.kv_cache import LayerState
from quire.engine.executor.step_tensors import StepTensors


def state_of(step: StepTensors, layer: int) -> LayerState:
    """Return the states of a layer."""
    state = step.caches[layer].state
    assert state is not None
    return state


class Convolution(nn.Module):
    """A depthwise causal convolution, whose state is the newest inputs of each sequence."""

    def __init__(self, plain: nn.Conv1d, *, silu: bool) -> None:
        """silu: apply silu to the result."""
        super().__init__()
        self.silu = silu
        # Plain tensors instead of parameters, because they are not weights of a GEMM.
        self.taps = plain.weight.detach()[:, 0].T.float().contiguous()  # [taps, channels]
        self.bias = None if plain.bias is None else plain.bias.detach().float()
        self.state: tuple[int, int] = self.taps.shape[0] - 1, self.taps.shape[1]

    def forward(self, x: Tensor, step: StepTensors, layer: int) -> Tensor:
        """[T, channels] -> [T, channels]."""
        where = step.rows, step.q_start, step.keeps
        states = state_of(step, layer).conv
        return ops.causal_conv(x, self.taps, self.bias, states, *where, self.silu, lens=step.lens)


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    step: StepTensors,
    layer: int,
    **how: Any,
) -> Tensor:
    """Run the linear recurrence of a layer over the step's tokens, by `ops.linear_recurrence`: [T, heads, values]."""
    recurrent = state_of(step, layer).recurrent
    assert recurrent is not None
    where = step.rows, step.q_start, step.keeps
    return ops.linear_recurrence(q, k, v, decay, beta, recurrent, *where, lens=step.lens, **how)


def negative_exp(logarithm: Tensor) -> Tensor:
    """Return -exp(x) in float32: the decay rate of each head from its stored logarithm."""
    return -torch.exp(logarithm.detach().float())
