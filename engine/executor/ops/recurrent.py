"""Operators of recurrent layers: causal convolution, and linear recurrence with or without the delta rule."""

from __future__ import annotations

import torch


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    q_start: torch.Tensor,
    keeps: torch.Tensor | None,
    silu: bool,
    lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve each channel of a sequence over its newest inputs: [T, channels] -> [T, channels].

    weight      [taps, channels] float32; the last tap multiplies the newest token; a GPU takes 2 to 4 taps
    bias        [channels] float32
    states      [slots, taps - 1, channels], dtype of x: the last inputs before the step, updated in place
    rows        [S] int32, the slot of each sequence; distinct
    q_start     [S + 1] int32, sequence s owns tokens q_start[s] .. q_start[s + 1] - 1
    keeps       [n, 2] int32 (end, state slot), by ascending end: copy the state before token `end` to this slot
    silu        apply silu to the result
    lens        [S] int32; a sequence of length 0 is padding: its outputs are 0, and it has no state

    A token's result has the same bits in any batch and any chunking of its prompt.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ops.quire.causal_conv.default(x, weight, bias, silu, states, rows, q_start, lens, keeps, out)
    return out


def linear_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    q_start: torch.Tensor,
    keeps: torch.Tensor | None,
    *,
    lens: torch.Tensor | None = None,
    q_scale: float = 1.0,
    eps: float = 0.0,
) -> torch.Tensor:
    """Return the outputs of a linear recurrence over each sequence: [T, heads, values] float32.

    q, k        [T, key_heads, keys], any strides as long as rows of keys are contiguous; heads % key_heads == 0;
                keys <= 256 on a GPU
    v           [T, heads, values], the same dtype
    decay       [T, heads] float32, logarithm of the factor of the old state
    beta        [T, heads] float32: factor of the delta rule; None: no delta rule
    states      [slots, heads, keys, values] float32, updated in place
    rows, q_start, keeps, lens  as in `causal_conv`
    q_scale     factor of q;  eps > 0: q and k become x / sqrt(sum(x^2) + eps) first

    Per token: S = exp(decay) S;  w = beta (v - k^T S), or v;  S = S + k w^T;  out = q^T S.  A token's result has the
    same bits in any batch and any chunking of its prompt.
    """
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    where = rows, q_start, lens, keeps
    torch.ops.quire.linear_recurrence.default(q, k, v, decay, beta, q_scale, eps, states, *where, out)
    return out


def gated_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, times silu(gate) if there is a gate.

    x [T, heads, size] float32 or `dtype`; gate the same shape, `dtype`; weight [size] float32; the result `dtype`.
    Computed in float32 and rounded once.  x and gate may have any strides as long as rows of `size` are contiguous.
    """
    if x.device.type == "cpu":
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
        return (normed if gate is None else normed * torch.nn.functional.silu(gate.float())).to(dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    torch.ops.quire.gated_norm.default(x, weight, eps, gate, out)
    return out


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, dt_bias: torch.Tensor, beta_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `decay` and `beta` of `linear_recurrence`, each [T, heads] float32, for Gated DeltaNet.

    decay = rate * softplus(a + dt_bias);  beta = beta_scale * sigmoid(b), where the sigmoid has the dtype of b.
    a, b [T, heads], rows contiguous; rate, dt_bias [heads] float32.
    """
    if a.device.type == "cpu":
        return rate * torch.nn.functional.softplus(a.float() + dt_bias), b.sigmoid().float() * beta_scale
    decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty_like(decay)
    torch.ops.quire.delta_gates.default(a, b, rate, dt_bias, beta_scale, decay, beta)
    return decay, beta
