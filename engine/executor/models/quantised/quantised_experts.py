"""Experts of a mixture that stay quantised: gpt-oss in mxfp4, other families in e4m3 (`fp8_experts.py`).

    files         gate_up_proj_blocks, _scales  ── as they are ──> StoredMxfp4 in QuantisedExperts
    the probe     QuantisedExperts dequantises both weights in every call: the reference
    Decoder       packs both for `ops.experts` (`packed`), which widens values in registers
    other layers  `pack_experts`: the same inside transformers' layers, for experts in e4m3
    elsewhere     `widen_experts` makes transformers' module of it, in the dtype of the model

`packs_experts` decides which devices have such kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from quire.engine.executor import ops
from quire.engine.executor.models.quantised.dequantise import E2M1, dequantise_mxfp4
from quire.engine.executor.models.quantised.fp8_experts import WEIGHTS, StoredFp8

log = logging.getLogger(__name__)

_HOPPER = 9  # compute capability; later GPUs have no wgmma


def packs_experts(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device has kernels for mxfp4 and e4m3 experts, in a model of `dtype`."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER


class StoredExpertWeight(Protocol):
    """The quantised weight of all experts of a layer."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight as transformers' module has it."""

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as transformers' module has it."""

    def packed(self, *, gate_up: bool) -> ops.PackedRows:
        """Return the weight as `ops.experts` takes it.  gate_up: it is the weight of gate and up, not of down."""

    def to(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight with `move` applied to its tensors."""


@dataclass(frozen=True)
class StoredMxfp4:
    """The weight of all experts of a layer, as files store it: e2m1[value] * 2^(scale - 127)."""

    blocks: Tensor  # u8 [experts, out, in / 32, 16]: two values per byte, the first in the low nibble
    scales: Tensor  # u8 [experts, out, in / 32]

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Round weight [experts, in, out] to mxfp4, on its device; the maximum of a group becomes 4 or 6."""
        numbers = torch.tensor(E2M1, device=weight.device)
        between = (numbers[1:] + numbers[:-1]) / 2
        blocks, scales = list[Tensor](), list[Tensor]()
        for expert in weight.detach():
            groups = expert.T.to(torch.float32).contiguous().unflatten(-1, (-1, 32))
            power = groups.abs().amax(-1).clamp_min(2.0**-100).log2().floor().sub(2)
            values = torch.bucketize(groups.abs() / power.exp2()[..., None], between).to(torch.uint8)
            values |= (groups < 0).to(torch.uint8) << 3
            blocks.append(values[..., 0::2] | values[..., 1::2] << 4)
            scales.append((power + 127).to(torch.uint8))
        return cls(torch.stack(blocks), torch.stack(scales))

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight as transformers' module has it: [experts, in, out]."""
        experts, out, groups, half = self.blocks.shape
        return torch.Size((experts, groups * half * 2, out))

    @property
    def fits(self) -> bool:
        """Whether these scales are within the range of the kernels' arithmetic."""
        return int(self.scales.max()) <= ops.LARGEST_SCALE

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [experts, in, out], exact except for overflow or underflow of `dtype`."""
        return dequantise_mxfp4(self.blocks, self.scales, dtype)

    def packed(self, *, gate_up: bool) -> ops.PackedRows:
        """Return the weight as `ops.experts` takes it; gate and up rows are interleaved."""
        return ops.pack_mxfp4(self.blocks, self.scales, interleaved=gate_up)

    def to(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight with `move` applied to its tensors."""
        return type(self)(move(self.blocks), move(self.scales))


class QuantisedExperts(nn.Module):
    """Experts that dequantise their weights in every call, the reference of our kernels."""

    def __init__(self, plain: Any, gate_up: StoredExpertWeight, down: StoredExpertWeight, dtype: torch.dtype) -> None:
        """plain: transformers' module, which keeps its biases.  dtype: dtype of the model."""
        super().__init__()
        self.plain, self.gate_up, self.down, self.dtype = plain, gate_up, down, dtype
        self._release()

    def forward(self, *inputs: Tensor) -> Tensor:
        self._widen()
        try:
            result: Tensor = self.plain(*inputs)
            return result
        finally:
            self._release()

    def packed(self) -> tuple[ops.PackedRows, ops.PackedRows]:
        """Return both weights in the format of `ops.experts`."""
        return self.gate_up.packed(gate_up=True), self.down.packed(gate_up=False)

    def widened(self) -> Any:
        """Return transformers' module with dequantised weights."""
        self._widen()
        return self.plain

    def _widen(self) -> None:
        for name, weight in zip(WEIGHTS, (self.gate_up, self.down), strict=True):
            setattr(self.plain, name, nn.Parameter(weight.dequantised(self.dtype), requires_grad=False))

    def _release(self) -> None:
        for name in WEIGHTS:
            if hasattr(self.plain, name):
                delattr(self.plain, name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the weights together with the module."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.gate_up, self.down = self.gate_up.to(fn), self.down.to(fn)
        return self


class PackedExperts(nn.Module):
    """Experts in e4m3 inside transformers' layers, computed by our operator: silu(gate) * up, no biases."""

    def __init__(self, gate_up: ops.PackedRows, down: ops.PackedRows) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.  hidden_states [.., hidden], top_k_* [T, k]."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen, weights = top_k_index.to(torch.int32).contiguous(), top_k_weights.to(torch.float32).contiguous()
        found = ops.experts(x.contiguous(), chosen, weights, self.gate_up, self.down)
        return found.view_as(hidden_states)


def whole_experts(weights: set[str]) -> set[str]:
    """Return the modules of experts whose two weights are both among these names."""
    modules = {name.rpartition(".")[0] for name in weights}
    return {module for module in modules if all(f"{module}.{name}" in weights for name in WEIGHTS)}


def await_experts(plain: Any) -> None:
    """Give experts on the meta device parameters of the shapes of stored blocks, which transformers then sets."""
    for name in WEIGHTS:
        experts, size, out = getattr(plain, name).shape
        blocks = torch.empty(experts, out, size // 32, 16, dtype=torch.uint8, device="meta")
        setattr(plain, name, nn.Parameter(blocks, requires_grad=False))


def settled_experts(plain: Any, scales: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Return the experts of `await_experts`, whose blocks are set.  scales: weight name -> scales.

    Dequantises them if a scale is out of the kernels' range."""
    gate_up, down = (StoredMxfp4(getattr(plain, name).detach(), scales[name]) for name in WEIGHTS)
    experts = QuantisedExperts(plain, gate_up, down, dtype)
    if gate_up.fits and down.fits:
        return experts
    log.info("experts in mxfp4 are dequantised: a scale is over 2^%d", ops.LARGEST_SCALE - 127)
    widened: nn.Module = experts.widened()
    return widened


def round_experts(model: PreTrainedModel) -> None:
    """Round the experts of a gpt-oss model that has random weights to mxfp4."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is GptOssExperts:
                gate_up, down = (StoredMxfp4.of(getattr(child, each)) for each in WEIGHTS)
                setattr(parent, name, QuantisedExperts(child, gate_up, down, model.dtype))


def quantised_children(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, QuantisedExperts]]:
    """Yield quantised experts with their parent and their name in it; the parent may replace them."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantisedExperts):
                yield parent, name, child


def pack_experts(model: PreTrainedModel) -> None:
    """Make our operator compute experts in e4m3 inside transformers' layers."""
    packed = list[ops.PackedRows]()
    for parent, name, child in quantised_children(model):
        if isinstance(child.gate_up, StoredFp8):
            weights = child.packed()
            setattr(parent, name, PackedExperts(*weights))
            packed += weights
    report_packed(packed)


def report_packed(weights: Sequence[ops.PackedRows]) -> None:
    """Log which experts stay quantised, and the memory that they take.  weights: two per layer."""
    if weights:
        size = sum(weight.bytes for weight in weights) / 1e9
        log.info("experts of %d layers stay in %s: they take %.1f GB", len(weights) // 2, weights[0].format, size)


def widen_experts(model: PreTrainedModel) -> None:
    """Dequantise mxfp4 experts in a model that keeps transformers' layers, which our kernels do not serve.  Logs how
    many."""
    found = list(quantised_children(model))
    for parent, name, child in found:
        setattr(parent, name, child.widened())
    if found:
        text = "experts of %d layers are dequantised to %s: the model keeps transformers' layers"
        log.info(text, len(found), model.dtype)
