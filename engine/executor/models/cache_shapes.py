"""Head sizes in the KV cache: the wider of key and value, rounded up to a size that the device's kernels support.

    heads of a layer                    cached on a CPU    cached on a GPU
    keys 128, values 128                128                128
    keys 192, values 128 (MiMo, MLA)    192                192
    keys 72, values 72                  72                 80

Zeros after a query and a key leave their dot product unchanged; zeros after a value give output columns that are cut
off.  `attention.kv_blocks` adds and cuts them.  They cost cache memory and reads, which the start log reports.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from quire.engine.executor.errors import UnsupportedModel
from quire.engine.executor.kv_cache import KVShape

log = logging.getLogger(__name__)

GPU_HEAD_SIZES = (64, 80, 96, 128, 192, 256)  # csrc/cuda/attention is compiled for these


def cached_layers(kind: str, layers: list[KVShape], device: torch.device) -> list[KVShape]:
    """Return the KV shape that each layer caches on the device.  layers: KV shape per layer; its head size is the
    wider one of key and value.

    kind: the model type.  Raises UnsupportedModel for heads wider than any kernel of a GPU takes."""
    if device.type != "cuda":
        return layers
    found = []
    for layer in layers:
        if not layer.heads:  # a layer without attention
            found.append(layer)
            continue
        size = next((size for size in GPU_HEAD_SIZES if size >= layer.head_size), None)
        if size is None:
            reason = f"head size {layer.head_size}; on a GPU it may be at most {GPU_HEAD_SIZES[-1]}"
            raise UnsupportedModel(f"{kind}: {reason}; --device cpu can do it")
        found.append(replace(layer, head_size=size))
    for own, cached in sorted({(a.head_size, b.head_size) for a, b in zip(layers, found, strict=True)}):
        if own < cached:
            share = 100 * (cached - own) / own
            log.warning("heads of %d are cached as heads of %d, which takes %.0f %% more KV memory", own, cached, share)
    return found
