"""The linear layers that models are served with, and the one place that makes them.

`Linears` decides how a weight is stored and which operator multiplies with it: plain, packed for a CPU, or quantised.
A shard of a weight would be made here too: callers name layers, norms and activations only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.executor import ops
from engine.executor.models.quantised import Quantised, QuantisedLinear


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


class Fp8Linear(nn.Module):
    """nn.Linear over a weight in e4m3, on a GPU: [..., in] -> [..., out], bfloat16."""

    def __init__(self, stored: ops.Fp8, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features = len(stored.scale)
        self.bias = bias
        self.stored = stored
        self.weight = torch.empty(0, dtype=dtype)  # as in PackedLinear

    def forward(self, x: Tensor) -> Tensor:
        y = ops.linear_fp8(x.reshape(-1, x.shape[-1]), self.stored, self.bias)
        return y.view(*x.shape[:-1], self.out_features)


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
        weight: Tensor | ops.Packed | ops.Fp8,
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
        self.fp8 = weight if isinstance(weight, ops.Fp8) else None
        self.weight = weight if isinstance(weight, Tensor) else None

    def forward(self, x: Tensor, plus: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """plus [T, out]: added, and perhaps overwritten.  out [T, out]: where to write the result."""
        norm, eps = (self.norm.weight, self.norm.eps) if self.norm else (None, 0.0)
        if self.weight is not None:
            return ops.linear(x, self.weight, self.bias, norm=norm, eps=eps, silu_mul=self.silu_mul, plus=plus, out=out)
        if self.fp8 is not None:
            return ops.linear_fp8(
                x, self.fp8, self.bias, norm=norm, eps=eps, silu_mul=self.silu_mul, plus=plus, out=out
            )
        assert self.packed is not None
        if norm is not None:
            x = ops.rms_norm(x, norm, eps)
        y = ops.packed_linear(x, self.packed, self.bias, plus)
        return ops.silu_mul(y) if self.silu_mul else y


@dataclass(frozen=True)
class Linears:
    """Makes the linear layers of one model."""

    ordered: bool  # on a CPU: products whose bits do not depend on the batch even where others are faster

    def product(
        self,
        *linears: nn.Linear | QuantisedLinear,
        norm: RMSNorm | None = None,
        silu_mul: bool = False,
        float32_out: bool = False,
    ) -> Product:
        """Return one product of the layers' common input; their outputs follow one another.

        norm: applied to the input first.  silu_mul: return silu(gate) * up of the output's halves, gate and up.
        float32_out: on a CPU, don't round the result to the dtype of the weights."""
        weight, size = _joined(linears), sum(linear.out_features for linear in linears)
        biases = [linear.bias for linear in linears if linear.bias is not None]  # all layers have one, or none
        bias = torch.cat(biases) if biases else None
        packed = self._pack(weight, float32_out)
        if packed is None:
            assert isinstance(weight, Tensor)  # every quantised weight is packed
            return Product(weight, bias, size, norm, silu_mul)
        return Product(packed, bias, size, norm, silu_mul)

    def alone(
        self, weight: Tensor | Quantised, bias: Tensor | None, dtype: torch.dtype, *, float32_out: bool = False
    ) -> PackedLinear | Fp8Linear | None:
        """Return a layer of weight [out, in] without norm; None: nothing is faster than what the model has.

        dtype: what code that asks the layer for the dtype of its weight shall see."""
        packed = self._pack(weight, float32_out)
        if isinstance(packed, ops.Fp8):
            return Fp8Linear(packed, bias, dtype)
        return None if packed is None else PackedLinear(packed, bias, dtype)

    def _pack(self, weight: Tensor | Quantised, float32_out: bool) -> ops.Packed | ops.Fp8 | None:
        if isinstance(weight, Quantised):
            pack = ops.pack_int8 if weight.numbers.dtype == torch.int8 else ops.Fp8
            return pack(weight.numbers, weight.scale)
        if weight.device.type != "cpu":
            return None
        return ops.pack_weight(weight, ordered=self.ordered, float32_out=float32_out)


def _joined(linears: Sequence[nn.Linear | QuantisedLinear]) -> Tensor | Quantised:
    """Return the weight of all layers, row after row; of one layer without a copy.  All or none are quantised."""
    quantised = [linear.quantised for linear in linears if isinstance(linear, QuantisedLinear)]
    if quantised:
        assert len(quantised) == len(linears)
        return quantised[0] if len(quantised) == 1 else Quantised.join(quantised)
    weights = [linear.weight.detach() for linear in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)
