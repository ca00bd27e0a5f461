"""Gated DeltaNet (arXiv 2412.06464): Qwen3-Next, Qwen3.5, OLMo Hybrid.

    x ──> q, k, v ── conv, silu ──> q, k scaled to length 1 ─┐
      ──> a: decay = -exp(A_log) * softplus(a + dt_bias) ────┤  S = exp(decay) S
      ──> b: beta = sigmoid(b) ──────────────────────────────┤  S = S + k (beta (v - k^T S))^T       per value head
      ──> z ─────────────────────────────────────────────────┴─ norm(q^T S / sqrt(keys)) * silu(z) ──> out_proj

Families differ only in how their input projections are grouped into linear layers: one function per family returns
`Projected`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.engine.executor import ops
from quire.engine.executor.models.linear import Linears
from quire.engine.executor.models.recurrent.layers import Convolution, negative_exp, recur
from quire.engine.executor.models.recurrent.states import StateShape
from quire.engine.executor.step_tensors import StepTensors

UNIT_EPS = 1e-6  # scaling to length 1, fixed in transformers


class Projected(NamedTuple):
    """Outputs of a layer's input projections for T tokens."""

    qkv: Tensor  # [T, 2 * key_heads * keys + heads * values]
    z: Tensor  # [T, heads * values], the output gate
    b: Tensor  # [T, heads]
    a: Tensor  # [T, heads]


def grouped(layer: Any, x: Tensor) -> Projected:
    """Project as Qwen3-Next: two linear layers, whose outputs are ordered by key head."""
    tokens, groups = len(x), layer.key_heads
    each = layer.heads // groups
    parts = [layer.keys, layer.keys, each * layer.values, each * layer.values]
    q, k, v, z = layer.in_proj_qkvz(x).view(tokens, groups, -1).split(parts, dim=2)
    ba = layer.in_proj_ba(x).view(tokens, groups, -1).split([each, each], dim=2)
    b, a = (part.reshape(tokens, -1).contiguous() for part in ba)  # reshape returns views if `each` is 1
    qkv = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], dim=1)
    return Projected(qkv, z.reshape(tokens, -1), b, a)


def joined(layer: Any, x: Tensor) -> Projected:
    """Project as Qwen3.5: one linear layer for q, k and v."""
    return Projected(layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x))


def separate(layer: Any, x: Tensor) -> Projected:
    """Project as OLMo Hybrid: one linear layer each for q, k, v, z, b and a."""
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=1)
    return Projected(qkv, layer.g_proj(x), layer.b_proj(x), layer.a_proj(x))


def merged(layer: Any, x: Tensor) -> Projected:
    """One linear layer for all, after `GatedDelta.merge`: q, k, v, z, b and a follow one another."""
    inner = layer.heads * layer.values
    sizes = [2 * layer.key_heads * layer.keys + inner, inner, layer.heads, layer.heads]
    return Projected(*layer.in_proj(x).split(sizes, dim=1))


# Input projections by name, in the order of `merged`.
MERGED: dict[Callable[[Any, Tensor], Projected], tuple[str, ...]] = {
    joined: ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    separate: ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
}


def of_one_type(linears: list[nn.Linear]) -> bool:
    """Whether all layers are of one type, so that one GEMM can replace them: plain, or quantised."""
    return len({type(linear) for linear in linears}) == 1


class GatedDelta(nn.Module):
    """Replaces a Gated DeltaNet module of transformers: [1, T, hidden] -> [1, T, hidden]."""

    def __init__(self, plain: Any, project: Callable[[Any, Tensor], Projected]) -> None:
        super().__init__()
        self.layer: int = plain.layer_idx
        self.heads, self.key_heads = plain.num_v_heads, plain.num_k_heads
        self.keys, self.values = plain.head_k_dim, plain.head_v_dim
        self.conv = Convolution(plain.conv1d, silu=True)
        self.rate, self.dt_bias = negative_exp(plain.A_log), plain.dt_bias.detach().float()
        self.beta_scale = 2.0 if getattr(plain, "allow_neg_eigval", False) else 1.0  # OLMo Hybrid
        norm: Any = plain.o_norm if hasattr(plain, "o_norm") else plain.norm
        self.norm_weight, self.norm_eps = norm.weight.detach().float(), float(norm.variance_epsilon)
        for name, child in plain.named_children():  # the linear layers, under their own names
            if name not in {"conv1d", "o_norm", "norm"}:
                self.add_module(name, child)
        self.out_name = "o_proj" if hasattr(plain, "o_proj") else "out_proj"
        self.project = project
        self.state = StateShape(self.layer, self.conv.state, (self.heads, self.keys, self.values))

    def forward(self, hidden_states: Tensor, *_: Any, step: StepTensors, **others: Any) -> Tensor:
        out: Tensor = getattr(self, self.out_name)(self.mix(hidden_states[0], None, step))
        return out[None]

    def mix(self, x: Tensor, _angles: Any, step: StepTensors) -> Tensor:
        """Return the input of the output projection: [T, hidden] -> [T, heads * values]."""
        qkv, z, b, a = self.project(self, x)
        width = self.key_heads * self.keys
        q, k, v = self.conv(qkv, step, self.layer).split([width, width, self.heads * self.values], dim=1)
        decay, beta = ops.delta_gates(a, b, self.rate, self.dt_bias, self.beta_scale)
        mixed = recur(
            q.unflatten(1, (self.key_heads, self.keys)),
            k.unflatten(1, (self.key_heads, self.keys)),
            v.unflatten(1, (self.heads, self.values)),
            decay,
            beta,
            step,
            self.layer,
            q_scale=self.keys**-0.5,
            eps=UNIT_EPS,
        )
        gate = z.unflatten(1, (self.heads, self.values))
        return ops.gated_norm(mixed, self.norm_weight, self.norm_eps, gate, x.dtype).flatten(1)

    def add(self, x: Tensor, angles: Any, step: StepTensors, plus: Tensor) -> Tensor:
        """Return `plus` with the layer's output added, in place: [T, hidden].  After `merge` only."""
        out: Tensor = getattr(self, self.out_name)(self.mix(x, angles, step), plus)
        return out

    def merge(self, linears: Linears) -> None:
        """Make one linear layer of the input projections, if their outputs are not ordered by key head, and let the
        output projection add to the residual stream."""
        setattr(self, self.out_name, linears.product(getattr(self, self.out_name)))
        names = MERGED.get(self.project, ())
        if names and of_one_type(parts := [getattr(self, name) for name in names]):
            self.in_proj = linears.product(*parts)
            for name in names:
                delattr(self, name)
            self.project = merged
