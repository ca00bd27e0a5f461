"""The linear layers that models are served with, and the one place that makes them.

`Linears` decides how a weight is stored and which operator multiplies with it: plain, or packed for a CPU.  A weight
that stays quantised, or a shard of one, would be made here too: callers name layers, norms and activations only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.executor import ops


class PackedLinear(nn.Module):
    """nn.Linear whose weight [out, in] exists in packed form only, so that it takes its memory once."""

    def __init__(self, packed: ops.Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features = packed.size
        self.bias = bias
        self.packed = packed  # no parameter or buffer: nothing but `packed_linear` can read it
        # Routers ask their own linear layer for its dtype.  Code that computes with this fails, and is refused at load.
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.packed_linear(x, self.packed, self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight: Tensor = plain.weight
        self.eps: float = plain.variance_epsilon


class Product(nn.Module):
    """A matrix product with the norm before it and the activation or addition after it: [T, in] -> [T, out].

    Several linear layers of the same input become one product: their outputs, one after another.
    """

    def __init__(
        self,
        weight: Tensor | ops.Packed,
        bias: Tensor | None,
        out_features: int,
        norm: RMSNorm | None,
        silu_mul: bool,
    ) -> None:
        super().__init__()
        self.bias = bias
        self.out_features = out_features
        self.norm = norm
        self.silu_mul = silu_mul
        self.packed = weight if isinstance(weight, ops.Packed) else None
        self.weight = None if isinstance(weight, ops.Packed) else weight

    def forward(self, x: Tensor, plus: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """plus [T, out]: added, and perhaps overwritten.  out [T, out]: where to write the result."""
        norm, eps = (self.norm.weight, self.norm.eps) if self.norm else (None, 0.0)
        if self.weight is not None:
            return ops.linear(x, self.weight, self.bias, norm=norm, eps=eps, silu_mul=self.silu_mul, plus=plus, out=out)
        assert self.packed is not None
        if norm is not None:
            x = ops.rms_norm(x, norm, eps)
        y = ops.packed_linear(x, self.packed, self.bias, plus)
        return ops.silu_mul(y) if self.silu_mul else y


SHARD = "shard"  # attribute of a linear layer of which this rank holds a part that needs the others: its Shard


class Shard(Protocol):
    """What becomes of the outputs of a layer of which this rank computes a part (`sharding.py`)."""

    out_features: int  # of the whole layer
    adds: bool  # this rank's part is the one that other numbers may be added to before `combine`

    def combine(self, part: Tensor) -> Tensor:
        """Return the layer's output [T, out_features] from what this rank computed."""


class Sharded(nn.Module):
    """A rank's part of a layer, and after it the exchange with the other ranks.  Called like `Product`."""

    def __init__(self, part: Product | PackedLinear, shard: Shard) -> None:
        super().__init__()
        self.part, self.shard = part, shard
        self.out_features = shard.out_features
        self.packed = part.packed
        self.weight = part.weight  # as other modules expect of a linear layer

    def forward(self, x: Tensor, plus: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y = self.shard.combine(self.part(x, plus) if plus is not None and self.shard.adds else self.part(x))
        return y if out is None else out.copy_(y)


def shared_out(part: Product | PackedLinear, plain: nn.Module) -> Product | PackedLinear | Sharded:
    """Return `part`, which takes the place of the layer `plain`, with the exchange that `plain` has, if any."""
    shard: Shard | None = getattr(plain, SHARD, None)
    return part if shard is None else Sharded(part, shard)


@dataclass(frozen=True)
class Linears:
    """Makes the linear layers of one model."""

    ordered: bool  # on a CPU: products whose bits do not depend on the batch even where others are faster

    def product(
        self, *linears: nn.Linear, norm: RMSNorm | None = None, silu_mul: bool = False, float32_out: bool = False
    ) -> Product | PackedLinear | Sharded:
        """Return one product of the layers' common input; their outputs follow one another.

        norm: applied to the input first.  silu_mul: return silu(gate) * up of the output's halves, gate and up.
        float32_out: on a CPU, don't round the result to the dtype of the weights."""
        first, *others = linears
        weight = torch.cat([linear.weight for linear in linears]) if others else first.weight.detach()
        bias = None if first.bias is None else torch.cat([linear.bias for linear in linears])
        product = Product(self._pack(weight, float32_out) or weight, bias, len(weight), norm, silu_mul)
        return shared_out(product, first)

    def alone(self, weight: Tensor, bias: Tensor | None, *, float32_out: bool = False) -> PackedLinear | None:
        """Return a layer of weight [out, in] without norm; None: nothing is faster than torch's own."""
        packed = self._pack(weight, float32_out)
        return None if packed is None else PackedLinear(packed, bias, weight.dtype)

    def _pack(self, weight: Tensor, float32_out: bool) -> ops.Packed | None:
        if weight.device.type != "cpu":
            return None
        return ops.pack_weight(weight, ordered=self.ordered, float32_out=float32_out)
