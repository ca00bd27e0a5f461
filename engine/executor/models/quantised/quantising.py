"""Quantises linear layers while weights are read, so that the host holds one float weight at a time.

`Quantising` belongs to one model.  hf.py calls its methods in this order:

    keep           sets modules that keep their stored values, because the device has a GEMM for these
    keep_experts   notes experts in e4m3 that can keep their stored values
    divide         sets modules sharded by columns, so that all ranks use the scale of the complete row
    while_loading  returns a class for transformers, which
                     makes the model       nn.Linear on the meta device ─> Awaiting: its weight is not there yet
                                           experts in fp8 ─────────────> wait for stored rows, or round (fp8_experts.py)
                     sets each weight      a float weight ──────────────> rounded to 8 or 4 bits at once
                                           stored values of a kept one ─> kept; stored_weights.py notes their `scales`
    settle         makes it computable     Awaiting ────────────────────> QuantisedLinear
                                           experts ─────────────────────> QuantisedExperts

Only quantised checkpoints have values to `keep`, and only several ranks `divide`.  A model that has its weights is
quantised by `quantise`, which needs neither `keep` nor `while_loading`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.engine.executor import ops
from quire.engine.executor.errors import UnsupportedModel
from quire.engine.executor.models.experts import is_experts
from quire.engine.executor.models.fusible import MIXTURES
from quire.engine.executor.models.quantised.dequantise import Kept
from quire.engine.executor.models.quantised.fp8_experts import (
    WEIGHTS,
    StoredExperts,
    await_rounding,
    await_rows,
    refused_for_fp8,
    settle_rows,
)
from quire.engine.executor.models.quantised.quantised import BITS, DTYPE, Kind, Quantised, QuantisedLinear, Scales
from quire.engine.executor.models.quantised.quantised_experts import (
    QuantisedExperts,
    await_experts,
    packs_experts,
    settled_experts,
    whole_experts,
)
from quire.engine.executor.ranks.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

GPU_CAPABILITY = (9, 0)  # minimum compute capability for quantised GEMMs: Hopper
NOT_STORED = "not every weight is stored in e4m3 or 4 bits, with groups that the kernels take"
# Last parts of the names of routers, which choose experts.  They are small, and quantisation could change the choice.
ROUTERS = {"gate", "router", "shared_expert_gate"}


def check_kind(kind: str, device: torch.device) -> None:
    """Raise UnsupportedModel unless the device has GEMMs for weights of this kind: the value of --quantize."""
    on_cpu = device.type == "cpu"
    if kind == "int8" and not on_cpu:
        raise UnsupportedModel("--quantize int8: only a CPU has GEMMs with int8 weights; --device cpu can do it")
    if kind == "fp8" and on_cpu:
        raise UnsupportedModel("--quantize fp8: a CPU has no GEMM with fp8 weights; --quantize int8 is made for it")
    if kind in ("fp8", "int4") and not on_cpu and (found := torch.cuda.get_device_capability(device)) < GPU_CAPABILITY:
        wanted, has = (".".join(map(str, version)) for version in (GPU_CAPABILITY, found))
        raise UnsupportedModel(f"--quantize {kind}: the GPU has compute capability {has}, its GEMMs need {wanted}")


def kept_kinds(device: torch.device, dtype: torch.dtype) -> set[Kept]:
    """Return the kinds of stored weights for which a device has a GEMM, in a model of `dtype`."""
    if device.type == "cpu":
        return {"int8", "int4"}
    if dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < GPU_CAPABILITY:
        return set()
    return {"fp8", "fp8 blocks", "int4"} if ops.multiplies_blocks(device) else {"fp8", "int4"}


# Format of a stored weight -> format of the linear layer that keeps it.  Only experts are stored in mxfp4.
ROUNDED: dict[Kept, Kind] = {"int8": "int8", "fp8": "fp8", "fp8 blocks": "fp8", "int4": "int4"}


def _units(kind: Kept, device: torch.device) -> tuple[int, int]:
    """Return the divisors that the sizes (in, out) of a layer must have."""
    if kind == "int4":
        return (ops.INT4_BLOCK, 1) if device.type == "cpu" else (ops.INT4_GPU_INNER, ops.INT4_GPU_OUT)
    if kind == "fp8 blocks":
        return ops.FP8_BLOCKS_INNER, ops.FP8_BLOCKS_OUT
    return (ops.FP8_INNER, ops.FP8_OUT) if kind == "fp8" else (1, 1)


def _fits(linear: nn.Linear, kind: Kept, device: torch.device) -> bool:
    """Whether a GEMM with quantised weights supports a layer of this size."""
    inner, out = _units(kind, device)
    return linear.in_features % inner == 0 and linear.out_features % out == 0


def _round_head(model: PreTrainedModel, device: torch.device) -> bool:
    """Quantise the LM head to 8 bits.  Returns False if no GEMM of the device supports its size; then it keeps its
    dtype.

    With int4 layers a 16-bit LM head would be up to half of the bytes that a step reads; 8 bits add little error."""
    head = model.get_output_embeddings()
    kind: Kind = "int8" if device.type == "cpu" else "fp8"
    if type(head) is not nn.Linear or not _fits(head, kind, device):
        return False
    rounded = Quantised.of(head.weight, DTYPE[kind])
    model.set_output_embeddings(QuantisedLinear(rounded, head.bias, head.weight.dtype))
    return True


class Awaiting(nn.Module):
    """A linear layer that quantises its weight as soon as it is set.  It cannot compute."""

    def __init__(
        self,
        plain: nn.Linear,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stored: bool,
        largest_of_rows: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """dtype: int8, float8_e4m3fn or uint8 (int4).  stored: the weight is set as values of this dtype.

        largest_of_rows: passed to `Quantised.of` if this layer is a shard of columns."""
        super().__init__()
        self.dtype, self.to_device, self.largest_of_rows = dtype, device, largest_of_rows
        self.served_dtype = plain.weight.dtype  # dtype of the model
        self.bias = plain.bias
        self.scales: Scales | None = None  # scales of a weight that was quantised here
        weight = plain.weight.detach()
        if weight.device.type == "meta":  # transformers casts a tensor to the dtype of the parameter that it replaces
            out, columns = weight.shape
            shape = (out, columns * BITS[dtype] // 8) if stored else (out, columns)
            weight = weight.new_empty(shape, dtype=dtype if stored else torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and value.device.type != "meta" and value.dtype != self.dtype:
            quantised = Quantised.of(value.to(self.to_device), self.dtype, self.largest_of_rows)
            self.scales = quantised.scales
            value = nn.Parameter(quantised.values, requires_grad=False)
            value._is_hf_initialized = True  # else transformers would initialise it at random
        super().__setattr__(name, value)


class Quantising:
    """Which layers of one model are quantised, and their scales while it is read."""

    def __init__(
        self, kind: Literal["none", "int8", "fp8", "int4"], device: torch.device, *, own_experts: bool = True
    ) -> None:
        """kind: the value of --quantize.  own_experts: our kernels compute experts of every family."""
        self.kind, self._device = None if kind == "none" else kind, device
        self._stored: Mapping[str, Kept] = {}
        self._ranks, self._divided = ALONE, frozenset[str]()
        self.kept: dict[str, Kept] = {}  # modules whose stored values are served
        self.scales: dict[str, Scales] = {}  # scales of these modules, until the model is settled
        self.kept_experts: set[str] = set()  # modules of experts whose stored mxfp4 values are served
        self.kept_rows: set[str] = set()  # modules, as files have them, of single experts whose e4m3 values are served
        self._own_experts, self._stored_experts = own_experts, StoredExperts(())
        self._fp8_experts: set[str] = set()  # modules of experts that are served in e4m3
        self._quantised_experts = False  # whether some of these were rounded here, not stored in e4m3
        self.scales_of_experts: dict[str, Tensor] = {}  # scales by weight, until the model is settled
        self._rounded_head = False

    def keep(self, modules: Mapping[str, Kept], dtype: torch.dtype) -> None:
        """Serve the quantised weights of these modules as stored, if the device has a GEMM for them in a model of
        `dtype`.

        Modules that `--quantize` covers follow that option instead."""
        experts = {weight for weight, kind in modules.items() if kind == "mxfp4"}
        if experts and packs_experts(self._device, dtype):
            self.kept_experts = whole_experts(experts)
        if len(modules) > len(experts):
            kinds = {kind for kind in kept_kinds(self._device, dtype) if self.kind in (None, ROUNDED[kind])}
            self._stored = {module: kind for module, kind in modules.items() if kind in kinds}

    def keep_experts(self, modules: Iterable[str]) -> None:
        """Serve the stored values of experts among these modules, if the device has kernels for the layer."""
        self._stored_experts = StoredExperts(set(modules))

    def divide(self, modules: Iterable[str], ranks: Ranks) -> None:
        """Take the names of modules sharded by columns.  A row's scale is that of the complete row, as with one rank.

        So the ranks exchange the maximum of each row; all ranks must set these weights in the same order."""
        self._ranks, self._divided = ranks, frozenset(modules)

    @property
    def quantises_activations(self) -> bool:
        """Whether GEMMs quantise their activations to e4m3 in steps of many tokens."""
        if self._device.type == "cpu":
            return False
        return self.kind == "fp8" or self._rounded_head or "fp8" in {ROUNDED[kind] for kind in self.kept.values()}

    @property
    def keeps_experts(self) -> bool:
        """Whether stored values of experts are served."""
        return bool(self.kept_experts or self.kept_rows)

    @property
    def changes(self) -> dict[str, str]:
        """Differences between the served weights and the files, for the fingerprint."""
        kinds = {f"{ROUNDED[kind]} as stored" for kind in self.kept.values()}
        kinds |= {self.kind} if self.kind else set()  # --quantize may quantise further modules
        changed = {"weights of linear layers": ", ".join(sorted(map(str, kinds)))} if kinds else {}
        return changed | ({"weights of experts": "fp8"} if self._quantised_experts else {})

    def while_loading(self, model: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """Return a class whose models await their weights.  `settle` restores the model's own class."""

        def init(made: PreTrainedModel, *args: Any, **options: Any) -> None:
            model.__init__(made, *args, **options)
            self.swap(made)

        return type(model.__name__, (model,), {"__init__": init, "__module__": model.__module__})

    def quantise(self, model: PreTrainedModel) -> None:
        """Quantise a model that has its weights.  Raises UnsupportedModel as `settle` does."""
        self.swap(model)
        self.settle(model, type(model))

    def swap(self, model: PreTrainedModel) -> None:
        """Replace linear layers of `model` by layers that await their weights; layers with weights are quantised at
        once.

        The LM head (but see `settle`), embeddings, routers, modules other than nn.Linear, and layers of sizes that no
        such GEMM supports stay unquantised."""
        head = model.get_output_embeddings()
        self._swap_experts(model)
        for path, parent in list(model.named_modules()):
            if path in self.kept_experts:
                await_experts(parent)
            for name, child in parent.named_children():
                if type(child) is not nn.Linear or child is head or name in ROUTERS:
                    continue
                full = f"{path}.{name}".lstrip(".")
                if (stored := self._stored.get(full)) and _fits(child, stored, self._device):
                    self.kept[full] = stored
                    setattr(parent, name, Awaiting(child, DTYPE[ROUNDED[stored]], self._device, stored=True))
                elif self.kind is not None and _fits(child, self.kind, self._device):
                    whole = self._ranks.all_max if full in self._divided else None
                    awaiting = Awaiting(child, DTYPE[self.kind], self._device, stored=False, largest_of_rows=whole)
                    setattr(parent, name, awaiting)

    def _swap_experts(self, model: PreTrainedModel) -> None:
        """Make experts that our kernels can compute in e4m3 await their weights.  Logs the others, and why."""
        # No kernel takes int4 experts: on a GPU, --quantize int4 rounds experts to e4m3.
        rounds = self.kind == "fp8" or (self.kind == "int4" and self._device.type != "cpu")
        if not (self._stored_experts or rounds):
            return
        reasons = Counter[tuple[str, str]]()
        for path, experts in model.named_modules():
            if not is_experts(experts):
                continue
            stored = self._stored_experts.of(path, len(experts.down_proj))
            if reason := self._refusal(model, experts) or ("" if stored or rounds else NOT_STORED):
                reasons[type(experts).__name__, reason] += 1
                continue
            self._fp8_experts.add(path)
            self.kept_rows |= stored
            if stored:
                await_rows(experts)
            else:
                await_rounding(experts, self._device)
                self._quantised_experts = True
        for (name, reason), layers in reasons.items():
            log.info("experts of %d layers (%s) are not served in fp8: %s", layers, name, reason)

    def _refusal(self, model: PreTrainedModel, experts: Any) -> str:
        """Return why no kernel of the device can compute these experts in e4m3; empty: one can."""
        if self._ranks.size > 1:
            return "several ranks"
        if not packs_experts(self._device, experts.down_proj.dtype):
            return "only a Hopper GPU in bfloat16 has kernels for them"
        if not (self._own_experts or isinstance(model, tuple(MIXTURES))):
            return "--no-own-experts"
        return refused_for_fp8(experts)

    def _settle_experts(self, model: PreTrainedModel) -> int:
        """Make experts in e4m3, whose weights are set, able to compute.  Returns the number of their weights."""
        weights = 0
        for path in self._fp8_experts:
            parent, _, name = path.rpartition(".")
            experts = model.get_submodule(path)
            gate_up, down = settle_rows(experts)
            weights += math.prod(gate_up.shape) + math.prod(down.shape)
            setattr(model.get_submodule(parent), name, QuantisedExperts(experts, gate_up, down, model.dtype))
        return weights

    def settle(self, model: PreTrainedModel, own: type[PreTrainedModel]) -> None:
        """Give the model its class `own` back, and replace its layers by quantised ones.  Its weights must be set.
        With int4 the LM head gets 8 bits.

        Raises UnsupportedModel if --quantize found nothing to quantise, and on a GPU for a model in another dtype than
        bfloat16."""
        model.__class__ = own
        quantised = self._settle_experts(model)
        bits = {8} if quantised else set[int]()
        for path, parent in list(model.named_modules()):
            for name, child in parent.named_children():
                if (full := f"{path}.{name}".lstrip(".")) in self.kept_experts:
                    scales_of = {each: self.scales_of_experts.pop(f"{full}.{each}") for each in WEIGHTS}
                    setattr(parent, name, settled_experts(child, scales_of, model.dtype))
                if isinstance(child, Awaiting):
                    scales = self.scales.pop(f"{path}.{name}".lstrip("."), child.scales)
                    assert scales is not None
                    weight = Quantised(child.weight.detach(), *scales)
                    quantised += math.prod(weight.shape)
                    bits.add(BITS[weight.values.dtype])
                    setattr(parent, name, QuantisedLinear(weight, child.bias, child.served_dtype))
        total = quantised + sum(parameter.numel() for parameter in model.parameters())
        on_gpu = self.kind == "fp8" or (self.kind == "int4" and self._device.type != "cpu")
        if on_gpu and model.dtype != torch.bfloat16:
            reason = f"its GEMMs need bfloat16, the model has {model.dtype}; --dtype bfloat16"
            raise UnsupportedModel(f"--quantize {self.kind}: {reason}")
        if self.kind and not quantised:
            kind = model.config.model_type
            raise UnsupportedModel(f"{kind}: --quantize {self.kind}: it has no linear layers to quantise")
        if self.kind == "int4":
            self._rounded_head = _round_head(model, self._device)
        if quantised:
            widths = " or ".join(map(str, sorted(bits)))
            log.info("%.0f %% of the %.0f million weights have %s bits", 100 * quantised / total, total / 1e6, widths)
