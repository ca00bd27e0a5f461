"""Scales of an e4m3 KV cache from a checkpoint: a cached value is its stored value times the scale.

    quant_method         what the config says                    tensors, after the name of a layer's attention
    compressed-tensors   kv_cache_scheme: float, static          k_scale, v_scale; formerly k_proj.output_scale
    modelopt             the same; kv_cache_quant_algo: FP8      k_proj.k_scale, v_proj.v_scale
    fp8                  nothing                                 k_scale, v_scale; or kv_scale for both

A tensor holds one scale for all KV heads, or one per head.  Layers without scales use a scale of 1.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quire.engine.executor.errors import UnsupportedModel
from quire.engine.executor.kv_cache import KVShape
from quire.engine.executor.models.quantised.quantisation import method_of, quantisation_config
from quire.engine.executor.models.weights import UNCHANGED, Names, StoredTensor, stored_tensors, weight_files
from quire.engine.executor.ranks.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

OF_LAYER = re.compile(
    r"(?P<before>.*?)layers\.(?P<layer>\d+)\.(?:self_attn|attn)\."
    r"(?:(?P<own>[kv])_scale|(?P<of>[kv])_proj\.(?P=of)_scale|(?P<output>[kv])_proj\.output_scale|kv_scale)"
)
KEYS, VALUES = 0, 1
SIDES = {"k": [KEYS], "v": [VALUES], None: [KEYS, VALUES]}


def read_kv_scales(
    directory: Path, kind: str, layers: Sequence[KVShape], ranks: Ranks = ALONE, names: Names = UNCHANGED
) -> list[Tensor | None] | None:
    """Return each layer's scales [2, Hkv] in float32, of keys and of values; None: the checkpoint has no scales for an
    e4m3 cache.

    layers: KV shape of each layer on this rank.  Raises UnsupportedModel for invalid scales."""
    described = quantisation_config(directory)
    if described is None:
        return None
    stored = stored_tensors(weight_files(directory), names)
    found = {match: each for name, each in stored.items() if (match := OF_LAYER.fullmatch(name))}
    if not found:
        return None
    if not _are_of_e4m3(described):
        log.warning("the scales of keys and values in this checkpoint are not used: its config has no e4m3 KV cache")
        return None
    places: dict[tuple[int, int], dict[str, StoredTensor]] = defaultdict(dict)  # layer, side -> tensors with its scale
    for match, tensor in found.items():
        for side in SIDES[match["own"] or match["of"] or match["output"]]:
            places[int(match["layer"]), side][match[0]] = tensor
    return [_of_layer(number, layer, places, kind, ranks) for number, layer in enumerate(layers)]


def _are_of_e4m3(described: dict[str, Any]) -> bool:
    """Whether the scales are for keys and values in e4m3, and static, so that they are equal for all requests."""
    scheme = described.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        e4m3 = scheme.get("num_bits") == 8 and scheme.get("type") == "float"
        return e4m3 and scheme.get("symmetric", True) is True and not scheme.get("dynamic")
    algorithm = described.get("kv_cache_quant_algo")
    return algorithm == "FP8" if algorithm is not None else method_of(described) == "fp8"


def _of_layer(
    number: int, layer: KVShape, places: dict[tuple[int, int], dict[str, StoredTensor]], kind: str, ranks: Ranks
) -> Tensor | None:
    """Return the scales [2, Hkv] of one layer; None: it has no scales."""
    said = [places.get((number, side), {}) for side in (KEYS, VALUES)]
    if not any(said):
        return None
    for side, tensors in zip(("keys", "values"), said, strict=True):
        if len(tensors) != 1:
            named = f": {' and '.join(sorted(tensors)[:2])}" if tensors else ""
            raise UnsupportedModel(f"{kind}: layer {number} has {len(tensors)} scales of cached {side}, not one{named}")
    return torch.stack([_read(*next(iter(tensors.items())), layer, kind, ranks) for tensors in said])


def _read(name: str, stored: StoredTensor, layer: KVShape, kind: str, ranks: Ranks) -> Tensor:
    """Return the scales of this rank's KV heads [Hkv]."""
    with safe_open(stored.file, "pt") as file:
        scales: Tensor = file.get_tensor(stored.name).float().flatten()
    if scales.numel() == 1:
        scales = scales.expand(layer.heads)
    else:  # each rank has its own heads; with more ranks than heads, several ranks share a head
        first = ranks.rank * scales.numel() // ranks.size
        mine = scales[first : first + max(1, scales.numel() // ranks.size)]
        if len(mine) != layer.heads:
            heads = f"{layer.heads} KV heads" + (f" in each of {ranks.size} ranks" if ranks.size > 1 else "")
            raise UnsupportedModel(f"{kind}: {name} has shape {list(stored.shape)}, for {heads}")
        scales = mine
    if not (scales.isfinite().all() and (scales > 0).all()):
        raise UnsupportedModel(f"{kind}: {name} holds {scales.min().item():g}, which is no scale")
    return scales
