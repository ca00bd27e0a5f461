"""Experts of a mixture in e4m3: as a checkpoint stores them, in e4m3 or 4 bits, or rounded by `--quantize fp8`.

    files         experts.3.up_proj.weight, _scale ── stored_rows ──> u8 [out, in + in / 16] per expert; transformers
                                                                      joins experts as it joins float weights
    --quantize    float weight [experts, out, in]  ── AwaitingExperts rounds each row when the weight is set
    both          u8 [experts, out, in + in / 16]  ── StoredFp8 in `QuantisedExperts`

4-bit values minus their zero points are exact in e4m3, and keep their scales.

A row has its values and then their scales.  So the code of transformers, which knows how each family names and joins
its experts, moves values and scales together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from quire.engine.executor import ops
from quire.engine.executor.models.experts import refusal
from quire.engine.executor.models.quantised.dequantise import Kept, Shape, as_stored
from quire.engine.executor.models.quantised.quantisation import Quantisation
from quire.engine.executor.models.quantised.quantised import MIDDLE, Quantised

WEIGHTS = ("gate_up_proj", "down_proj")
STORED_PER_EXPERT = 3  # weights of an expert in the files: gate, up and down
SCALE_BYTES = 4  # float32, one per ops.TILE values of a row
LAYER_OF_EXPERT = re.compile(r"\blayers\.(\d+)\..*\bexperts\.\d+\.\w+$")  # in the module name of a single expert


def row_bytes(size: int) -> int:
    """Return the bytes of a row of `size` values with its scales."""
    return size + size // ops.TILE * SCALE_BYTES


def refused_for_fp8(experts: Any) -> str:
    """Return why our kernels cannot compute these experts in fp8; empty: they can."""
    if reason := refusal(experts):
        return reason
    _, hidden, inner = experts.down_proj.shape
    if hidden % ops.TILE or inner % ops.TILE:
        return f"hidden size {hidden} or inner size {inner} is no multiple of {ops.TILE}"
    return ""


def stored_in_rows(how: Quantisation, parts: Collection[str], dtype: str, shape: Shape, kept: Kept | None) -> bool:
    """Whether `stored_rows` can keep the weight of one expert.

    dtype: of the stored values, as safetensors names it.  shape: of the weight.  kept: format for a linear layer."""
    if len(shape) != 2 or shape[1] % ops.TILE:
        return False
    if kept == "int4":
        return how.group % ops.TILE == 0  # 0: the group is a row
    if how.format != "scaled" or dtype != "F8_E4M3" or "zero_point" in parts:
        return False
    return how.strategy != "block" or how.block[1] % ops.TILE == 0


def stored_rows(how: Quantisation, parts: dict[str, Tensor]) -> Tensor:
    """Return the stored values and scales of one expert's weight [out, in] as rows, unchanged."""
    if how.bits == 4:
        return rows_of_int4(as_stored(how, parts))
    values, scale = parts["weight"], parts["scale"].to(torch.float32)
    rows, size = values.shape
    if how.strategy == "block":
        high, wide = how.block
        scale = scale[torch.arange(rows) // high][:, torch.arange(0, size, ops.TILE) // wide]
    else:
        scale = scale.reshape(-1, 1).expand(rows, size // ops.TILE)
    return joined_rows(values, scale)


def rows_of_int4(weight: Quantised) -> Tensor:
    """Return an int4 weight as rows.  A value minus its zero point, from -15 to 15, is exact in e4m3."""
    size, groups = weight.shape[1], weight.scale.shape[1]
    values = torch.stack([weight.values & 0xF, weight.values >> 4], -1).flatten(1).to(torch.float32)
    zero = torch.tensor(float(MIDDLE)) if weight.zero is None else weight.zero[..., None].to(torch.float32)
    centred = values.unflatten(1, (groups, -1)).sub_(zero).flatten(1)
    scale = weight.scale[:, torch.arange(0, size, ops.TILE) // (size // groups)]
    return joined_rows(centred.to(torch.float8_e4m3fn), scale)


def joined_rows(values: Tensor, scale: Tensor) -> Tensor:
    """Join values e4m3 [out, in] and scale float32 [out, in / TILE] -> u8 [out, row_bytes(in)]."""
    return torch.cat([values.view(torch.uint8), scale.contiguous().view(torch.uint8)], -1)


def rounded_rows(weight: Tensor) -> Tensor:
    """Round weight [experts, out, in] to e4m3 with a scale per row, on its device."""
    rows = torch.empty(*weight.shape[:2], row_bytes(weight.shape[2]), dtype=torch.uint8, device=weight.device)
    for place, expert in zip(rows, weight, strict=True):
        rounded = Quantised.of(expert, torch.float8_e4m3fn)
        place.copy_(joined_rows(rounded.values, rounded.scale[:, None].expand(-1, weight.shape[2] // ops.TILE)))
    return rows


@dataclass(frozen=True)
class StoredFp8:
    """The weight of all experts of a layer in e4m3."""

    rows: Tensor  # u8 [experts, out, row_bytes(in)]

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight: [experts, out, in]."""
        experts, out, size = self.rows.shape
        return torch.Size((experts, out, size * ops.TILE // row_bytes(ops.TILE)))

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return values e4m3 [experts, out, in] and scales float32 [experts, out, in / TILE]."""
        values, scales = self.rows.tensor_split([self.shape[2]], -1)
        return values.contiguous().view(torch.float8_e4m3fn), scales.contiguous().view(torch.float32)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [experts, out, in], computed in float32 and rounded once."""
        result = torch.empty(self.shape, dtype=dtype, device=self.rows.device)
        for place, values, scales in zip(result, *self._parts(), strict=True):
            grouped = values.to(torch.float32).unflatten(-1, (-1, ops.TILE))
            place.copy_(grouped.mul_(scales[..., None]).flatten(-2))
        return result

    def packed(self, *, gate_up: bool) -> ops.PackedRows:
        """Return the weight in the format of `ops.experts`."""
        return ops.pack_fp8(*self._parts())

    def to(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight with `move` applied to its tensor."""
        return type(self)(move(self.rows))


class AwaitingExperts:
    """Base of experts that round a float weight to e4m3 as soon as it is set.  They cannot compute."""

    rounds_on: torch.device

    def __setattr__(self, name: str, value: Any) -> None:
        if name in WEIGHTS and value.device.type != "meta" and value.dtype != torch.uint8:
            value = nn.Parameter(rounded_rows(value.detach().to(self.rounds_on)), requires_grad=False)
            value._is_hf_initialized = True  # else transformers would initialise it at random
        super().__setattr__(name, value)


def await_rows(experts: Any) -> None:
    """Give experts on the meta device parameters of the shape of stored rows, which transformers then sets."""
    for name in WEIGHTS:
        *lead, size = getattr(experts, name).shape
        rows = torch.empty(*lead, row_bytes(size), dtype=torch.uint8, device="meta")
        setattr(experts, name, nn.Parameter(rows, requires_grad=False))


def await_rounding(experts: Any, device: torch.device) -> None:
    """Make experts round their weights on `device`: at once, or when transformers sets weights that are on `meta`."""
    own = type(experts)
    experts.__class__ = type(own.__name__, (AwaitingExperts, own), {"__module__": own.__module__})
    experts.rounds_on = device
    for name in WEIGHTS:
        weight = getattr(experts, name).detach()
        if weight.device.type == "meta":  # transformers casts a tensor to the dtype of the parameter that it replaces
            weight = weight.to(torch.float32)
        setattr(experts, name, nn.Parameter(weight, requires_grad=False))


def settle_rows(experts: Any) -> tuple[StoredFp8, StoredFp8]:
    """Restore the class of experts whose rows are set, and return their weights: gate and up, down."""
    if isinstance(experts, AwaitingExperts):
        experts.__class__ = type(experts).__bases__[1]
    gate_up, down = (StoredFp8(getattr(experts, name).detach()) for name in WEIGHTS)
    return gate_up, down


class StoredExperts:
    """The modules of a checkpoint that hold one weight of one expert, by layer."""

    def __init__(self, modules: Collection[str]) -> None:
        """modules: names of all modules whose weights stay as the checkpoint stores them (see `stored_rows`)."""
        self._by_layer: dict[str, set[str]] = defaultdict(set)
        for module in modules:
            if match := LAYER_OF_EXPERT.search(module):
                self._by_layer[match[1]].add(module)

    def __bool__(self) -> bool:
        return bool(self._by_layer)

    def of(self, path: str, experts: int) -> set[str]:
        """Return the stored modules of the experts at `path`; empty: not all of their weights are stored so."""
        match = re.search(r"\blayers\.(\d+)\.", path)
        modules = self._by_layer.get(match[1], set()) if match else set()
        return modules if len(modules) == STORED_PER_EXPERT * experts else set()
