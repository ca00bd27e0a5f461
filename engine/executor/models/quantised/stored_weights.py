"""Loads a quantised checkpoint: transformers takes one weight at a time, which is dequantised at that moment.

    files      layers.0.mlp.up_proj.weight_packed ┐
               layers.0.mlp.up_proj.weight_scale  ├─ QuantisedWeight ─ [...] ─> layers.0.mlp.up_proj.weight, bfloat16
               layers.0.mlp.up_proj.weight_shape  ┘
               norm.weight ──────────────────────── as it is ─────────────────> norm.weight

The headers of the files have all names, dtypes and shapes.  A tensor that does not fit is refused before any data is
read.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.engine.executor import ops
from quire.engine.executor.errors import UnsupportedModel
from quire.engine.executor.models.cuts import Cut, Where, part_of
from quire.engine.executor.models.precision import PLAIN, check_plain
from quire.engine.executor.models.quantised.dequantise import (
    Kept,
    Shape,
    as_stored,
    check_shapes,
    dequantise,
    in_order_of_groups,
    stored_as,
)
from quire.engine.executor.models.quantised.fp8_experts import stored_in_rows, stored_rows
from quire.engine.executor.models.quantised.joined_experts import join_experts, joined_name
from quire.engine.executor.models.quantised.quantisation import Format, Quantisation
from quire.engine.executor.models.quantised.quantised import BLOCK, Quantised
from quire.engine.executor.models.quantised.quantising import Quantising
from quire.engine.executor.models.quantised.stored_areas import read_area, shape_of
from quire.engine.executor.models.weights import UNCHANGED, Names, StoredTensor, stored_tensors, weight_files

# Patterns of the names of stored tensors: the weight that a tensor belongs to, and its kind (part).
PARTS: dict[Format, str] = {
    "scaled": r"(?P<of>.+?)_(?P<part>scale|zero_point)(_inv)?",
    "packed": r"(?P<of>.+\.weight)_(?P<part>packed|scale|shape|zero_point|g_idx)",
    "awq": r"(?P<of>.+)\.(?P<part>qweight|qzeros|scales)",
    "gptq": r"(?P<of>.+)\.(?P<part>qweight|qzeros|scales|g_idx)",
    "mxfp4": r"(?P<of>.+)_(?P<part>blocks|scales)",
    "fp4": r"(?P<of>.+\.weight)_(?P<part>packed|scale_2|scale|global_scale)",  # modelopt calls the packed part `weight`
}
# Dtypes of the scales of a format's weights, as safetensors names them; other formats: any floating-point dtype, or
# E8M0.
SCALES: dict[Format, set[str]] = {"mxfp4": {"U8"}, "fp4": {"F8_E4M3", "U8"}}
# Scales of activations and of cached keys and values.  They are ignored here: activations are in the model's dtype, and
# kv_scales.py reads the scales of the cache.
OF_ACTIVATIONS = re.compile(
    r".+[._]((input|output|activation)_(scale|zero_point|global_scale)|[qkv]_(scale|zero_point)|kv_scale)"
)
EIGHT_BITS = {"F8_E4M3", "I8"}


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight, or a rank's shard of it, in stored form; `weight[...]` dequantises it."""

    how: Quantisation
    module: str
    parts: dict[str, Any]  # lazy slices of files, read when they are indexed
    shape: Shape  # shape of the unsharded weight
    dtype: torch.dtype
    quantising: Quantising
    cut: Cut | None = None  # None: all of it

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        if self.module.rpartition(".")[0] in self.quantising.kept_experts:
            parts, _ = self._read(None)
            self.quantising.scales_of_experts[self.module] = parts["scales"]
            return parts["blocks"]
        if self.module in self.quantising.kept_rows:
            parts, _ = self._read(None)
            return stored_rows(self.how, parts)
        pieces: Sequence[Where | None] = self.cut.pieces(self.shape) if self.cut else [None]
        if self.module in self.quantising.kept:
            quantised = Quantised.join([self._stored(where) for where in pieces])
            self.quantising.scales[self.module] = quantised.scales
            return quantised.values
        made = [self._plain(where) for where in pieces]
        return self.cut.join(made) if self.cut else made[0]

    def _read(self, where: Where | None) -> tuple[dict[str, Tensor], Where]:
        """Return the stored tensors of an area, and the position of `where` in the weight that they make."""
        stored = self.parts
        if self.quantising.kept.get(self.module) == "int4":  # `exact_modules` excludes act-order weights
            stored = {part: tensor for part, tensor in stored.items() if part != "g_idx"}
        if where is None:
            return {part: tensor[...] for part, tensor in stored.items()}, ()
        return read_area(self.how, stored, where)

    def _plain(self, where: Where | None) -> Tensor:
        parts, inner = self._read(where)
        # A weight that is quantised to 8 or 4 bits here is not rounded to 16 bits first.
        return dequantise(self.how, parts, torch.float32 if self.quantising.kind else self.dtype)[inner]

    def _stored(self, where: Where | None) -> Quantised:
        parts, inner = self._read(where)
        quantised = as_stored(self.how, parts)
        if self.how.strategy == "block":
            return quantised  # `exact_modules` keeps shards at block borders
        if self.how.bits == 4:  # `exact_modules` keeps shards at group borders
            rows = inner[:1]
            return quantised.to(lambda tensor: tensor[rows].contiguous())
        return Quantised(quantised.values[inner].contiguous(), quantised.scale[inner[:1]].contiguous())


class StoredWeights:
    """The tensors of a quantised checkpoint, under the names and shapes of the model."""

    def __init__(self, directory: Path, config: PretrainedConfig, how: Quantisation, names: Names = UNCHANGED) -> None:
        """Read the headers.  Raises UnsupportedModel for tensors that `how` does not explain."""
        self.kind, self.how, self._names = config.model_type, how.renamed(names.own), names
        self._tensors = tensors = stored_tensors(weight_files(directory), names)
        self._weights: dict[str, dict[str, str]] = defaultdict(dict)  # weight, kind of part -> name of the tensor
        self._plain: list[str] = []
        for name, stored in tensors.items():
            self._sort(name, stored)
        plain = {name: tensors[name] for name in self._plain}
        check_plain(plain, config, ", and its scales are not in the weight files")
        self._stored_values: dict[str, tuple[str, Shape]] = {}  # dtype and shape of each weight's stored values
        self._shapes: dict[str, Shape] = {}  # shape per tensor of the model
        for weight, parts in self._weights.items():
            self._check(weight, parts)
            named = [parts[part] for part in ("weight", "packed", "qweight") if part in parts]
            first = tensors[named[0] if named else min(parts.values())]
            self._stored_values[weight] = first.dtype, first.shape
            self._shapes[weight] = shape_of(how, {part: tensors[name].shape for part, name in parts.items()})
        self._shapes |= {name: tensors[name].shape for name in self._plain}
        self.sizes: dict[str, int] = defaultdict(int)  # bytes to read for each tensor of the model
        for name, parts in [*((name, {"": name}) for name in self._plain), *self._weights.items()]:
            self.sizes[joined_name(self.kind, name)] += sum(tensors[one].bytes for one in parts.values())

    def _sort(self, name: str, stored: StoredTensor) -> None:
        """Sort a tensor: part of a quantised weight, scale of activations (ignored), or a plain tensor."""
        tensors, part = self._tensors, re.fullmatch(PARTS[self.how.format], name)
        if OF_ACTIVATIONS.fullmatch(name):
            return
        if self.how.format != "scaled":
            if part is not None:
                of = part["of"] if self.how.format in ("packed", "mxfp4", "fp4") else part["of"] + ".weight"
                self._weights[of][part["part"]] = name
                return
            if self.how.format == "fp4" and stored.dtype == "U8" and f"{name}_scale" in tensors:
                self._weights[name]["packed"] = name
                return
        elif part is not None and part["of"] in tensors:
            self._weights[part["of"]] |= {"weight": part["of"], part["part"]: name}
            return
        elif stored.dtype in EIGHT_BITS and any(name + suffix in tensors for suffix in ("_scale", "_scale_inv")):
            return  # it is added together with its scale
        self._plain.append(name)

    def _check(self, weight: str, named: dict[str, str]) -> None:
        """Raise UnsupportedModel unless the stored tensors of these names make a weight."""
        parts = {part: self._tensors[name] for part, name in named.items()}
        try:
            check_shapes(self.how, {part: stored.shape for part, stored in parts.items()})
            if self.how.format == "scaled" and parts["weight"].dtype not in EIGHT_BITS:
                raise ValueError(f"it is {parts['weight'].dtype} and has a scale")
            if self.how.format == "fp4" and parts["packed"].dtype != "U8":
                raise ValueError(f"its values are {parts['packed'].dtype}")
            scale = parts.get("scale") or parts["scales"]
            if scale.dtype not in SCALES.get(self.how.format, PLAIN | {"F8_E8M0"}):
                raise ValueError(f"its scale is {scale.dtype}")
            if self._is_ignored(weight.removesuffix(".weight"), min(named.values())):
                raise ValueError("the config says that it is not")
        except ValueError as error:
            raise UnsupportedModel(f"{self.kind}: {weight} is quantised by {self.how.method}, but {error}") from error

    def _is_ignored(self, module: str, tensor: str) -> bool:
        """Whether the config says that a module is not quantised; tensor: name of one of the module's tensors."""
        in_file = self._tensors[tensor].name.removesuffix(tensor.removeprefix(module))
        return self.how.ignores(module, [in_file, self._names.whole(module)])

    @property
    def names(self) -> set[str]:
        """Names of the tensors, as the model has them."""
        return set(self._shapes)

    def exact_modules(self, cuts: Mapping[str, Cut]) -> dict[str, Kept]:
        """Return the modules whose stored values (or a rank's shard of them) a GEMM can use unchanged, with their
        format.

        A shard must consist of complete blocks and groups.  Weights whose groups are not consecutive columns
        (act-order) are excluded, so this reads each g_idx."""
        found: dict[str, Kept] = {}
        for weight, parts in self._weights.items():
            kind = stored_as(self.how, parts, *self._stored_values[weight])
            if kind is None or not self._divides(kind, cuts.get(weight), self._shapes[weight]):
                continue
            if kind == "int4" and (name := parts.get("g_idx")):
                with safe_open(self._tensors[name].file, "pt") as file:
                    if not in_order_of_groups(file.get_tensor(self._tensors[name].name), self.how):
                        continue
            found[weight.removesuffix(".weight")] = kind
        return found

    def rows_of_experts(self, cuts: Mapping[str, Cut], exact: Mapping[str, Kept]) -> set[str]:
        """Return the modules whose stored values can stay as they are if the modules are experts (`stored_rows`).

        exact: what `exact_modules` returned."""
        found = set()
        for weight, parts in self._weights.items():
            module, (dtype, _) = weight.removesuffix(".weight"), self._stored_values[weight]
            taken = stored_in_rows(self.how, parts, dtype, self._shapes[weight], exact.get(module))
            if weight not in cuts and taken:
                found.add(module)
        return found

    def _divides(self, kind: Kept, cut: Cut | None, shape: Shape) -> bool:
        """Whether the shard of a weight begins and ends at borders of its blocks or groups."""
        if kind == "mxfp4":
            return cut is None
        unit = 1
        if cut is not None and kind == "fp8 blocks":
            unit = BLOCK
        elif cut is not None and kind == "int4" and cut.dim == -1:
            unit = math.lcm(self.how.group or 1, ops.INT4_BLOCK)
        pieces = [piece[cut.dim] for piece in cut.pieces(shape)] if cut is not None else []
        return all(piece.start % unit == 0 and piece.stop % unit == 0 for piece in pieces)

    @contextlib.contextmanager
    def opened(self, cuts: Mapping[str, Cut], dtype: torch.dtype, quantising: Quantising) -> Iterator[dict[str, Any]]:
        """Yield the tensors, which are read and dequantised when they are indexed, while the files are open.

        cuts: shards of this rank.  dtype: dtype of dequantised weights."""
        with contextlib.ExitStack() as stack:
            files = sorted({each.file for each in self._tensors.values()})
            opened = {file: stack.enter_context(safe_open(file, "pt")) for file in files}
            slices = {own: opened[each.file].get_slice(each.name) for own, each in self._tensors.items()}
            tensors = {name: part_of(slices[name], self._shapes[name], cuts.get(name)) for name in self._plain}
            for weight, parts in self._weights.items():
                stored = {part: slices[name] for part, name in parts.items()}
                module, shape = weight.removesuffix(".weight"), self._shapes[weight]
                tensors[weight] = QuantisedWeight(self.how, module, stored, shape, dtype, quantising, cuts.get(weight))
            yield join_experts(self.kind, tensors, dtype)

    def without_meaning(self, unexpected: Collection[str], tensors: Mapping[str, Any]) -> set[str]:
        """Return the tensors that the model does not have and that change nothing: biases of zeros.

        Some versions of gptq added such a bias to each layer that they quantised."""
        return {name for name in unexpected if self._is_no_bias(name, tensors)}

    def _is_no_bias(self, name: str, tensors: Mapping[str, Any]) -> bool:
        if not name.endswith(".bias") or self.how.format != "gptq" or name not in tensors:
            return False
        return name.removesuffix("bias") + "weight" in self._weights and not tensors[name][...].any()

    def check(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedModel for a model whose layers store their transpose."""
        if any(type(part) is Conv1D for part in model.modules()):
            raise UnsupportedModel(f"{self.kind}: quantised weights of layers that store their transpose")


@contextlib.contextmanager
def in_this_thread() -> Iterator[None]:
    """Make transformers load tensors one by one, on the calling thread.

    By default it loads on threads of its own, each with a float32 weight and an OpenMP team."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
