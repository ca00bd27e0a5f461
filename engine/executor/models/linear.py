"""The linear layers that models are served with, and the factory that makes them all.

`Linears` decides how a weight is stored and which GEMM uses it: plain, packed for a CPU, or quantised.  A rank's shard
of a layer is wrapped here too (`Sharded`): callers name only layers, norms and activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from quire.engine.executor import ops
from quire.engine.executor.lora.sites import Sites
from quire.engine.executor.models.quantised.quantised import Quantised, QuantisedLinear


def tile_tokens(model: nn.Module) -> int:
    """Return the maximum rows per tile of the CPU's GEMMs in the model's linear layers; 1: no tiles, or not known."""
    packed = (getattr(module, "packed", None) for module in model.modules())
    return max((ops.tile_tokens(one) for one in packed if isinstance(one, ops.Packed)), default=1)


class PackedLinear(nn.Module):
    """nn.Linear whose weight [out, in] exists in packed form only, so that no second copy takes memory."""

    def __init__(self, packed: ops.Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features = packed.size
        self.bias = bias
        self.packed = packed  # no parameter or buffer: only `packed_linear` can read it
        # Routers read the dtype of their linear layer's weight.  Code that computes with this empty tensor fails at
        # load.
        self.weight = torch.empty(0, dtype=dtype)
        self.adapted: Adapted | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = ops.packed_linear(x, self.packed, self.bias)
        if self.adapted is not None:
            self.adapted.add(x, y)
        return y


@dataclass(frozen=True)
class Adapted:
    """A GEMM's registration as a site of LoRA adapters."""

    sites: Sites
    number: int

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the output of the step's adapters for x to y, in place."""
        self.sites.apply(self.number, x, y)


class GpuLinear(nn.Module):
    """nn.Linear on a GPU with an e4m3 or int4 weight, or with a float32 result: [..., in] -> [..., out]."""

    def __init__(
        self, stored: Tensor | ops.Fp8 | ops.Int4, bias: Tensor | None, dtype: torch.dtype, *, wide: bool
    ) -> None:
        """wide: the result is float32."""
        super().__init__()
        self.out_features = len(stored) if isinstance(stored, Tensor) else stored.rows
        self.bias = bias
        self.stored = stored
        self.wide = wide
        self.weight = torch.empty(0, dtype=dtype)  # as in PackedLinear
        self.adapted: Adapted | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = ops.linear(x.reshape(-1, x.shape[-1]), self.stored, self.bias, float32_out=self.wide)
        if self.adapted is not None:
            self.adapted.add(x, y)
        return y.view(*x.shape[:-1], self.out_features)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight: Tensor = plain.weight
        self.eps: float = plain.variance_epsilon


class Product(nn.Module):
    """A GEMM with the norm before it and the activation or addition after it: [T, in] -> [T, out].

    Several linear layers with the same input become one GEMM, whose output has their outputs side by side.
    """

    def __init__(
        self,
        weight: Tensor | ops.Packed | ops.Fp8 | ops.Int4,
        bias: Tensor | None,
        out_features: int,
        norm: RMSNorm | None,
        silu_mul: bool,
        wide: bool,
    ) -> None:
        """wide: on a GPU, the result is float32."""
        super().__init__()
        self.bias = bias
        self.out_features = out_features
        self.norm = norm
        self.silu_mul = silu_mul
        self.wide = wide
        self.packed = weight if isinstance(weight, ops.Packed) else None
        self.weight = None if isinstance(weight, ops.Packed) else weight
        self.adapted: Adapted | None = None

    def forward(
        self, x: Tensor, plus: Tensor | None = None, out: Tensor | None = None, normed: Tensor | None = None
    ) -> Tensor:
        """plus [T, out]: added to the result; may be overwritten. out [T, out]: buffer of the result. normed: x after
        the norm, if already computed."""
        if self.adapted is not None and (rows := self.adapted.sites.rows) is not None:
            if isinstance(rows, ops.DeviceAdapters):
                return self._with_device_adapters(self.adapted.number, rows, x, plus, normed)
            return self._with_adapters(self.adapted, x, plus, normed)
        norm, eps = (self.norm.weight, self.norm.eps) if self.norm and normed is None else (None, 0.0)
        x = x if normed is None else normed
        if self.weight is not None:
            rest: dict[str, Any] = {"silu_mul": self.silu_mul, "plus": plus, "out": out, "float32_out": self.wide}
            return ops.linear(x, self.weight, self.bias, norm=norm, eps=eps, **rest)
        assert self.packed is not None
        return ops.packed_linear(x, self.packed, self.bias, plus, norm=norm, eps=eps, silu_mul=self.silu_mul)

    def _with_adapters(self, adapted: Adapted, x: Tensor, plus: Tensor | None, normed: Tensor | None) -> Tensor:
        """`forward` on a CPU in a step with LoRA adapters, which add before the activation.  Rows without an adapter
        get the same bits as in a step without adapters."""
        if self.norm is not None:
            x = ops.rms_norm(x, self.norm.weight, self.norm.eps) if normed is None else normed
        y = self._gemm(x, plus)
        adapted.add(x, y)
        return ops.silu_mul(y) if self.silu_mul else y

    def _with_device_adapters(
        self, site: int, rows: ops.DeviceAdapters, x: Tensor, plus: Tensor | None, normed: Tensor | None
    ) -> Tensor:
        """`forward` on a GPU in a step with adapters.

        Rows without an adapter differ only by rounding, and only if the GEMM has a fused norm or activation."""
        inner = x if normed is None else normed
        if self.norm is not None and normed is None:
            inner = ops.rms_norm(x, self.norm.weight, self.norm.eps)
        if ops.has_lora_branch(len(inner), inner.device):
            return ops.lora_on_branch(inner, rows, site, lambda: self._gemm(inner, plus), silu_mul=self.silu_mul)
        if len(inner) <= ops.LORA_TILE:
            y, ready = self._gemm_sharing(inner, plus)
            return ops.lora_on_gpu(inner, rows, site, y, silu_mul=self.silu_mul, x_is_ready=ready)
        h = ops.lora_shrink(inner, rows, site)  # before the GEMM, which prefetches its weights meanwhile
        return ops.lora_expand(h, rows, site, self._gemm(inner, plus), silu_mul=self.silu_mul)

    def _gemm_sharing(self, x: Tensor, plus: Tensor | None) -> tuple[Tensor, bool]:
        """Return the result of `_gemm`, and whether the next kernel may read x before this GEMM has ended."""
        if isinstance(self.weight, Tensor):
            return ops.linear_sharing_x(x, self.weight, self.bias, plus)
        return self._gemm(x, plus), False

    def _gemm(self, x: Tensor, plus: Tensor | None) -> Tensor:
        """Return the GEMM of a normed input, without the activation."""
        if self.packed is not None:
            return ops.packed_linear(x, self.packed, self.bias, plus)
        assert self.weight is not None
        return ops.linear(x, self.weight, self.bias, plus=plus)

    def add(self, x: Tensor, plus: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor | None]:
        """Return `plus` with the GEMM added, and None: the next GEMM computes the norm."""
        return self(x, plus), None


SHARD = "shard"  # attribute of a sharded linear layer: its Shard


class Shard(Protocol):
    """Combines the ranks' outputs of a sharded layer (`sharding.py`)."""

    out_features: int  # outputs of the unsharded layer
    adds: bool  # other values may be added to this rank's output before `combine`

    def combine(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the layer's output [T, out_features] from this rank's output `part`, written to `out` if given."""

    def fuses_norm(self, rows: int, dtype: torch.dtype) -> bool:
        """Return whether `add_and_norm` supports this number of rows; equal on all ranks."""

    def add_and_norm(self, x: Tensor, part: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Add the layer's output to x [T, out_features] in place.  Return x, and x after `norm`."""


class Sharded(nn.Module):
    """A rank's shard of a layer, and the collective after it.  Called like `Product`."""

    def __init__(self, part: Product | PackedLinear | GpuLinear, shard: Shard) -> None:
        super().__init__()
        self.part, self.shard = part, shard
        self.out_features = shard.out_features
        self.packed = getattr(part, "packed", None)
        self.wide = getattr(part, "wide", False)
        self.weight = part.weight  # as other modules expect of a linear layer

    def forward(self, x: Tensor, plus: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self.shard.combine(self.part(x, plus) if plus is not None and self.shard.adds else self.part(x), out)

    def add(self, x: Tensor, plus: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor | None]:
        """Return the sum of `plus` (perhaps overwritten) and the layer's output, and the sum after `norm` if the
        all-reduce computes it; else None."""
        if norm is None or not self.shard.fuses_norm(len(x), x.dtype):
            return self(x, plus), None
        return self.shard.add_and_norm(plus, self.part(x), norm)


Part = TypeVar("Part", bound=Product | PackedLinear | GpuLinear)


def shared_out(part: Part, plain: nn.Module) -> Part | Sharded:
    """Return the replacement `part` of the layer `plain`, with the collective of `plain` if that is sharded."""
    shard: Shard | None = getattr(plain, SHARD, None)
    return part if shard is None else Sharded(part, shard)


@dataclass(frozen=True)
class Linears:
    """Makes the linear layers of one model."""

    ordered: bool  # on a CPU: batch-invariant GEMMs (bit for bit), even if others are faster
    dtype: torch.dtype  # dtype of the model
    sites: Sites | None = None  # sites of LoRA adapters; None: no adapters are served

    def product(
        self,
        *linears: nn.Linear | QuantisedLinear,
        norm: RMSNorm | None = None,
        silu_mul: bool = False,
        float32_out: bool = False,
    ) -> Product | Sharded:
        """Return one GEMM for layers with the same input; it has their outputs side by side.

        The layers release their weights, so that at most one GEMM's weights exist twice.

        norm: applied to the input first.  silu_mul: return silu(gate) * up of the output's halves, gate and up.
        float32_out: don't round the result to the dtype of the weights."""
        weight, size = _joined(linears), sum(linear.out_features for linear in linears)
        site = self.sites.add(linears) if self.sites is not None else -1
        _let_go(linears)
        biases = [linear.bias for linear in linears if linear.bias is not None]  # all layers have one, or none
        bias = torch.cat(biases) if biases else None
        packed = self._pack(weight, float32_out)
        made = packed if packed is not None else weight
        assert not isinstance(made, Quantised)  # every quantised weight is packed
        wide = float32_out and self._widens(weight)
        product = Product(made, bias, size, norm, silu_mul, wide)
        if self.sites is not None and site >= 0:
            product.adapted = Adapted(self.sites, site)
        return shared_out(product, linears[0])

    def alone(
        self, weight: Tensor | Quantised, bias: Tensor | None, dtype: torch.dtype, *, float32_out: bool = False
    ) -> PackedLinear | GpuLinear | None:
        """Return a layer for this weight [out, in], without norm; None: keep the model's own layer.

        dtype: reported to code that asks the layer for the dtype of its weight."""
        packed = self._pack(weight, float32_out)
        wide = float32_out and self._widens(weight)
        if isinstance(packed, ops.Fp8 | ops.Int4):
            return GpuLinear(packed, bias, dtype, wide=wide)
        if wide:
            assert isinstance(weight, Tensor)  # quantised weights are packed
            return GpuLinear(weight.detach(), bias, dtype, wide=wide)
        return None if packed is None else PackedLinear(packed, bias, dtype)

    def adapt(self, plain: nn.Module, served: nn.Module | None) -> None:
        """Let adapters add to the layer `plain`.  `served` replaces it; None: `plain` stays."""
        if self.sites is None or (site := self.sites.add_called(plain)) < 0:
            return
        if isinstance(served, PackedLinear | GpuLinear):
            served.adapted = Adapted(self.sites, site)
        else:
            self.sites.hook(plain, site)

    def _widens(self, weight: Tensor | Quantised) -> bool:
        """Return whether a GEMM's result in float32 differs from one in the model's dtype, on a GPU."""
        device = weight.values.device if isinstance(weight, Quantised) else weight.device
        return device.type != "cpu" and self.dtype != torch.float32

    def _pack(self, weight: Tensor | Quantised, float32_out: bool) -> ops.Packed | ops.Fp8 | ops.Int4 | None:
        if isinstance(weight, Quantised):
            ordered = self.ordered or self.dtype != torch.bfloat16  # only bfloat16 rows have an unordered GEMM
            if weight.values.dtype == torch.uint8:
                if weight.values.device.type != "cpu":
                    return ops.pack_int4_gpu(weight.values, weight.scale, weight.zero)
                return ops.pack_int4(weight.values, weight.scale, weight.zero, ordered=ordered)
            if weight.values.dtype == torch.int8:
                return ops.pack_int8(weight.values, weight.scale, ordered=ordered, float32_out=float32_out)
            return ops.Fp8(weight.values, weight.scale)
        if weight.device.type != "cpu":
            return None
        return ops.pack_weight(weight, ordered=self.ordered, float32_out=float32_out)


def _let_go(linears: Sequence[nn.Linear | QuantisedLinear]) -> None:
    """Release the weights of these layers.  A weight shared with the embedding stays there."""
    for linear in linears:
        if isinstance(linear, nn.Linear):
            linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)


def _joined(linears: Sequence[nn.Linear | QuantisedLinear]) -> Tensor | Quantised:
    """Return the weights of all layers, concatenated by rows; a single weight is not copied.  All or none are
    quantised."""
    quantised = [linear.quantised for linear in linears if isinstance(linear, QuantisedLinear)]
    if quantised:
        assert len(quantised) == len(linears)
        return Quantised.join(quantised)
    weights = [linear.weight.detach() for linear in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)
