"""The short convolution of LFM2: a gated causal convolution over a few tokens, instead of attention.

x ── in_proj ──> b, c, y        h = conv(b * y), per channel over the newest `taps` tokens        out_proj(c * h)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.engine.executor.models.recurrent.layers import Convolution
from quire.engine.executor.models.recurrent.states import StateShape
from quire.engine.executor.step_tensors import StepTensors


class ShortConv(nn.Module):
    """Replaces a convolution module of transformers: [1, T, hidden] -> [1, T, hidden]."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.layer: int = plain.layer_idx
        self.conv = Convolution(plain.conv, silu=False)
        self.in_proj, self.out_proj = plain.in_proj, plain.out_proj
        self.state = StateShape(self.layer, self.conv.state)

    def forward(self, hidden_states: Tensor, *_: Any, step: StepTensors, **others: Any) -> Tensor:
        gate, out_gate, value = self.in_proj(hidden_states[0]).chunk(3, dim=-1)
        mixed = self.conv(gate * value, step, self.layer)
        out: Tensor = self.out_proj(out_gate * mixed)
        return out[None]
