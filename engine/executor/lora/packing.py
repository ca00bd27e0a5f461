"""Packs an adapter's matrices into one tensor in the kernels' layout, after checks against the base model.

Uses only numpy, because torch would start a second OpenMP team.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.engine.adapters.config import ALL_LINEAR, AdapterConfig
from quire.engine.adapters.errors import AdapterError
from quire.engine.adapters.files import AdapterFile, Matrix, Pair
from quire.engine.adapters.patterns import PLAIN, by_key, endings, full_matches
from quire.engine.executor import ops
from quire.engine.executor.lora.layouts import GpuBlocks, Layout, Numbers, Strips
from quire.engine.executor.lora.pinned import pinned
from quire.engine.executor.lora.sites import Part, Site

Array = npt.NDArray[np.float32]
OVERFLOW = {
    torch.float16: 65_520.0,
    torch.bfloat16: float.fromhex("0x1.ffp127"),
}  # values of at least this size round to infinity
LAYER = re.compile(r"(?:.*?\.)?[^.]*\.(\d+)\.")  # the first number in a path, as PEFT finds a module's layer


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter ready to serve."""

    weights: torch.Tensor  # [elements], dtype of the model
    table: torch.Tensor  # [sites, LORA_FIELDS] int64
    rank: int  # maximum rank of its layers

    @property
    def bytes(self) -> int:
        """Return the bytes of host memory."""
        return self.weights.nbytes + self.table.nbytes


@dataclass(frozen=True)
class Packer:
    """Packs adapters for one model."""

    sites: Sequence[Site]
    dtype: torch.dtype  # dtype of the model
    layout: Layout

    def pack(self, file: AdapterFile) -> PackedAdapter:
        """Return the packed adapter.  Raises AdapterError if it does not fit the model."""
        scales = scales_of(file, [part.path for site in self.sites for part in site.parts])
        table = np.zeros((len(self.sites), ops.LORA_FIELDS), dtype=np.int64)
        pieces: list[Numbers] = []
        size = 0

        def put(matrix: Array, name: str, packed: Callable[[Numbers], Numbers]) -> int:
            nonlocal size
            first = size
            pieces.append(packed(self._rounded(matrix, f"{file.where}: {name}")))
            size += pieces[-1].size
            return first

        for number, site in enumerate(self.sites):
            parts = [(at, part) for at, part in enumerate(site.parts) if part.path in file.pairs]
            if not parts:
                continue
            shrinks = []
            for at, part in parts:
                pair = file.pairs[part.path]
                check_shapes(file.where, pair, site, part)
                if pair.a.rows > self.layout.max_ranks:
                    allowed = f"--lora-max-rank allows {self.layout.max_ranks}"
                    raise AdapterError(f"{file.where}: {part.path} has rank {pair.a.rows}, {allowed}")
                shrinks.append(self.layout.with_ranks(values(pair.a)))
                with np.errstate(over="ignore", invalid="ignore"):  # `put` refuses values that are not finite
                    expand = values(pair.b) * np.float32(scales[part.path])
                offset = put(expand, f"{part.path}.lora_B", self.layout.expand)
                table[number, 2 + 4 * at : 6 + 4 * at] = offset, len(shrinks[-1]), part.first, part.outputs
            shrink = np.concatenate(shrinks)
            table[number, :2] = put(shrink, f"{parts[0][1].path}.lora_A", self.layout.shrink), len(shrink)
        whole = np.concatenate(pieces) if pieces else np.zeros(0, dtype=self._stored)
        weights = torch.from_numpy(whole).view(self.dtype)
        return PackedAdapter(weights, torch.from_numpy(table), max(pair.a.rows for pair in file.pairs.values()))

    @property
    def _stored(self) -> npt.DTypeLike:
        stored: dict[torch.dtype, npt.DTypeLike] = {
            torch.float32: np.float32,
            torch.float16: np.float16,
            torch.bfloat16: np.uint16,
        }
        return stored[self.dtype]

    def _rounded(self, matrix: Array, name: str) -> Numbers:
        """Return a matrix in the model's dtype, bfloat16 as uint16 bits.  Raises AdapterError if this dtype cannot hold
        a value."""
        largest = max(-float(matrix.min()), float(matrix.max()))
        if not math.isfinite(largest):
            raise AdapterError(f"{name}: holds NaN or infinity")
        if largest >= OVERFLOW.get(self.dtype, math.inf):
            raise AdapterError(f"{name}: values up to {largest:g} exceed {str(self.dtype).removeprefix('torch.')}")
        if self.dtype == torch.float32:
            return matrix
        if self.dtype == torch.float16:
            return matrix.astype(np.float16)
        bits = matrix.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )


def packer_for(sites: Sequence[Site], dtype: torch.dtype) -> Packer:
    """Return the packer of a model on this CPU.  The kernels must be loaded."""
    return Packer(sites, dtype, Strips(*ops.packed_layout(dtype)))


def gpu_pack(sites: Sequence[Site], dtype: torch.dtype, max_rank: int) -> Callable[[AdapterFile], PackedAdapter]:
    """Return a function that packs adapters for a GPU, up to `max_rank`, into pinned memory."""
    packer = Packer(sites, dtype, GpuBlocks(max_rank))

    def pack(file: AdapterFile) -> PackedAdapter:
        packed = packer.pack(file)
        weights, table = pinned(packed.weights, packed.table)
        return PackedAdapter(weights, table, packed.rank)

    return pack


def values(matrix: Matrix) -> Array:
    """Return a stored matrix in float32."""
    shape = matrix.rows, matrix.columns
    if matrix.dtype == "BF16":
        wide = np.frombuffer(matrix.data, dtype="<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(shape)
    kind = "<f4" if matrix.dtype == "F32" else "<f2"
    return np.frombuffer(matrix.data, dtype=kind).astype(np.float32).reshape(shape)


def check_shapes(where: str, pair: Pair, site: Site, part: Part) -> None:
    """Raise AdapterError unless the matrices A and B of a layer have the layer's sizes."""
    for name, size, wanted in (("inputs", pair.a.columns, site.inputs), ("outputs", pair.b.rows, part.outputs)):
        if size != wanted:
            raise AdapterError(
                f"{where}: {part.path} has {size} {name}, the base model {wanted}: an adapter of another model"
            )


def scales_of(file: AdapterFile, layers: Sequence[str]) -> dict[str, float]:
    """Return the factor of B A for each adapted layer.

    layers: paths of the base model's linear layers.  Raises AdapterError unless the weights are for the layers that the
    config targets."""
    config, where, paths = file.config, file.where, list(file.pairs)
    if unknown := sorted(set(paths) - set(layers)):
        what = "experts take no adapter" if ".experts." in unknown[0] else "the base model has no such linear layer"
        raise AdapterError(f"{where}: {unknown[0]}: {what}")
    targets = targets_of(config, layers, where)
    if lacking := sorted(targets - set(paths)):
        raise AdapterError(f"{where}: target_modules names {lacking[0]}, the weights lack it")
    if further := sorted(set(paths) - targets):
        raise AdapterError(f"{where}: the weights have {further[0]}, target_modules does not name it")
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank_keys, alpha_keys = by_key(ranks, paths, where), by_key(alphas, paths, where)
    scales = {}
    for path in paths:
        rank = ranks[rank_keys[path]] if path in rank_keys else config.r
        if rank != file.pairs[path].a.rows:
            raise AdapterError(f"{where}: {path} has rank {file.pairs[path].a.rows}, the config says {rank}")
        alpha = alphas[alpha_keys[path]] if path in alpha_keys else config.lora_alpha
        scales[path] = config.scale(rank, alpha)
    return scales


def targets_of(config: AdapterConfig, layers: Sequence[str], where: str) -> set[str]:
    """Return the base model's linear layers that a config targets, by PEFT's rules.  Raises AdapterError."""
    targets = config.target_modules
    if not targets:
        raise AdapterError(f"{where}: target_modules is empty; adapters name the layers that they change")
    if isinstance(targets, str):
        found = set(layers) if targets.lower() == ALL_LINEAR else full_matches([targets], layers, where)[targets]
    else:
        names = set(targets)
        found = {path for path in layers if not names.isdisjoint(endings(path))}
        found = {path for path in found if in_layers(config, path, where)}
    excluded = config.exclude_modules
    if isinstance(excluded, str) and excluded:
        found -= full_matches([excluded], layers, where)[excluded]
    elif excluded:
        names = set(excluded)
        found = {path for path in found if names.isdisjoint(endings(path))}
    return found


def in_layers(config: AdapterConfig, path: str, where: str) -> bool:
    """Return whether `layers_to_transform` includes the layer of a module.  Raises AdapterError."""
    wanted, patterns = config.layers_to_transform, config.layers_pattern
    if wanted is None or wanted == []:
        return True
    names = [patterns] if isinstance(patterns, str) else patterns or []
    if odd := [name for name in names if name and not PLAIN.fullmatch(name)]:
        raise AdapterError(f"{where}: layers_pattern {odd[0]!r} is a regular expression; plain names are served")
    own = [re.compile(rf"(?:.*?\.)?{re.escape(name)}\.(\d+)\.") for name in names if name] or [LAYER]
    match = next((match for pattern in own if (match := pattern.match(path))), None)
    return match is not None and int(match[1]) in ([wanted] if isinstance(wanted, int) else wanted)
