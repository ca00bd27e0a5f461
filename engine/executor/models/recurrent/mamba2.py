"""Mamba2 (arXiv 2405.21060): Bamba, Granite 4, Falcon-H1, Nemotron-H.

    x ── in_proj ──> z, (x, B, C), dt       x, B, C ── conv, silu ──>  S = exp(dt * A) S + B (dt x)^T      per head
                                                                       y = C^T S + D x
    out_proj(norm(y, gated by silu(z)))     dt = softplus(dt + dt_bias), within the time-step limit

B and C are the keys and the queries of a group of heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.engine.executor.models.recurrent.layers import Convolution, negative_exp, recur
from quire.engine.executor.models.recurrent.states import StateShape
from quire.engine.executor.step_tensors import StepTensors


class Mamba2(nn.Module):
    """Replaces a Mamba2 mixer of transformers: [1, T, hidden] -> [1, T, hidden]."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.layer: int = plain.layer_idx
        self.heads, self.head_size = plain.num_heads, plain.head_dim
        self.groups, self.keys = plain.n_groups, plain.ssm_state_size
        self.inner: int = plain.intermediate_size
        self.limit: tuple[float, float] = tuple(plain.time_step_limit)
        self.conv = Convolution(plain.conv1d, silu=True)
        self.rate, self.skip = negative_exp(plain.A_log), plain.D.detach()
        self.dt_bias = plain.dt_bias.detach()
        self.in_proj, self.out_proj = plain.in_proj, plain.out_proj
        # Falcon-H1 scales the inputs and each part of the projection, and may have no norm.
        self.in_scale: float = getattr(plain, "ssm_in_multiplier", 1.0)
        mup: Tensor | None = getattr(plain, "mup_vector", None)
        self.part_scale = None if mup is None else mup.detach()[0]
        self.norm = plain.norm if getattr(plain, "mamba_rms_norm", True) else None
        self.state = StateShape(self.layer, self.conv.state, (self.heads, self.keys, self.head_size))

    def forward(self, hidden_states: Tensor, *_: Any, step: StepTensors, **others: Any) -> Tensor:
        x = hidden_states[0]
        projected = self.in_proj(x * self.in_scale if self.in_scale != 1.0 else x)
        if self.part_scale is not None:
            projected = projected * self.part_scale
        gate, mixed, dt = projected.split([self.inner, self.conv.state[1], self.heads], dim=1)
        width = self.groups * self.keys
        y, b, c = self.conv(mixed, step, self.layer).float().split([self.inner, width, width], dim=1)
        dt = nn.functional.softplus(dt + self.dt_bias.to(dt.dtype)).clamp(*self.limit).float()
        y = y.unflatten(1, (self.heads, self.head_size))
        out = recur(
            c.unflatten(1, (self.groups, self.keys)),
            b.unflatten(1, (self.groups, self.keys)),
            y * dt[..., None],
            self.rate * dt,
            None,
            step,
            self.layer,
        )
        out = (out + y * self.skip.float()[:, None]).flatten(1)
        out = self.norm(out, gate) if self.norm is not None else out * nn.functional.silu(gate)
        result: Tensor = self.out_proj(out.to(x.dtype))
        return result[None]
