"""Mixtures of experts: on a GPU in bfloat16 or float16; on a CPU in plain loops, the reference of the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.engine.executor.ops.packed_experts import PackedRows

MAX_EXPERTS, MAX_CHOSEN = 512, 32  # maximum experts per layer; maximum experts chosen per token
MAX_PAIRS = 512  # maximum (token, expert) pairs per call of `experts`, unless `takes_all_pairs`
MAX_TOKENS = 16_384  # maximum tokens per call of the operator, to bound its memory; more are split
_HOPPER, _WHOLE_SLABS = 9, 64  # major compute capability; divisor of the hidden and inner size


def takes_all_pairs(hidden: int, inner: int, device: torch.device) -> bool:
    """Return whether `experts` supports any number of tokens for these sizes; if not, T * k is at most MAX_PAIRS."""
    if hidden % _WHOLE_SLABS or inner % _WHOLE_SLABS or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER  # later GPUs have no wgmma


def route(logits: torch.Tensor, top: int, *, normalise: bool, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top-k experts of each token by logits [T, E] -> (expert ids int32, weights float32), both [T, top].

    Weights are the softmax over all experts.

    normalise  a token's weights are divided by their sum
    rounded    weights are rounded to the dtype of the logits
    """
    chosen = torch.empty(logits.shape[0], top, dtype=torch.int32, device=logits.device)
    weights = torch.empty(logits.shape[0], top, dtype=torch.float32, device=logits.device)
    torch.ops.quire.route.default(logits, normalise, rounded, chosen, weights)
    return chosen, weights


@dataclass(frozen=True)
class Clamped:
    """The activation of gpt-oss: g * sigmoid(alpha * g) * (u + 1), where g is `gate` and u is `up`, both clamped.

    g = min(gate, limit), u = max(-limit, min(up, limit))."""

    alpha: float
    limit: float  # positive


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | PackedRows,
    down: torch.Tensor | PackedRows,
    plus: torch.Tensor | None = None,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    clamped: Clamped | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's expert outputs: x [T, hidden] -> [T, hidden].

    plus [T, hidden]  the sum is added to it, in place, and `plus` is returned
    chosen, weights  [T, k] as `route` returns them; T * k is at most MAX_PAIRS unless `takes_all_pairs`
    gate_up          [E, 2 * inner, hidden]: per expert gate rows, then up rows; both sizes are multiples of 8.
                     With `clamped` gate and up rows are interleaved.  If `takes_all_pairs` and x is bfloat16, gate_up
                     and down may be packed: as mxfp4 with `clamped`, as fp8 without
    gate_up_bias     [E, 2 * inner], in the order of the rows
    down             [E, hidden, inner]
    down_bias        [E, hidden]
    clamped          the activation; None: silu(gate) * up

    Reads each chosen expert once.  The number of pairs selects the kernel; otherwise a token's result does not depend
    on other tokens."""
    name, alpha, limit = ("silu", 0.0, 0.0) if clamped is None else ("clamped", clamped.alpha, clamped.limit)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if plus is None else plus
    for first in range(0, len(x), MAX_TOKENS):
        part = slice(first, first + MAX_TOKENS)
        routed = x[part], chosen[part], weights[part]
        rest = name, alpha, limit, plus is not None, out[part]
        if isinstance(gate_up, PackedRows) and isinstance(down, PackedRows):
            biased = gate_up.tiles, gate_up_bias, down.tiles, down_bias
            torch.ops.quire.experts_packed.default(*routed, gate_up.format, *biased, *rest)
        else:
            torch.ops.quire.experts.default(*routed, gate_up, gate_up_bias, down, down_bias, *rest)
    return out
