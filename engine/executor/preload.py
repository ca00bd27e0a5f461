"""Warms caches in a spare engine, so that its activation (takeover) takes less time.

The activation reads config, weights and fingerprint again.  So if the model's files change meanwhile, the new files are
served.  A waiting spare holds:

    host memory     the imported packages, the kernels' library; with a GPU also `swap_memory_gib` of pinned memory
    page cache      the weight files, read ahead; the kernel drops them when it needs the memory
    GPU memory      its CUDA context with the modules of the kernels it has run, about 0.5 GB
"""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from quire.engine.common import host_resources
from quire.engine.config import EngineConfig
from quire.engine.core.plan import Sampler, Slice, Start, StepPlan
from quire.engine.executor import host_memory, local, ops
from quire.engine.executor.models import hf, overrides
from quire.engine.executor.models.weights import weight_files
from quire.engine.wire.messages import Sampling

log = logging.getLogger(__name__)

# Prefixes of config fields for placeholder tokens of images and sound.  The rehearsal has no such tokens, but config
# classes reject null for these fields.
OTHER_TOKENS = ("image_", "video_", "vision_", "audio_", "boi_", "eoi_", "boa_", "eoa_")
TINY_VOCAB, TINY_LEN = 1024, 256  # vocabulary and context of the tiny model for the rehearsal


def prepare(config: EngineConfig) -> Iterator[str]:
    """Prepare for `config`; each `next` does one part.  A part that fails raises."""
    torch.set_num_threads(1)  # at the activation another thread starts its own OpenMP team
    ops.load(library=Path(config.kernels) if config.kernels else None)
    yield "kernels"
    kind = local.device_kind(config)
    directory = hf.find(config.model) if config.model in hf.INCLUDED else Path(config.model).expanduser()
    if not directory.is_dir():
        return  # a name on the hub: resolved, and perhaps downloaded, at the activation
    if config.load != "random":
        read_ahead(weight_files(directory))
        yield "weight files"
    if kind == "cuda":
        if not config.spare_on_gpu:
            return
        torch.zeros(1, device="cuda")
        yield "context"
    rehearse(config, directory)
    yield "rehearsal"
    if kind == "cuda" and config.preempt != "recompute" and config.swap_memory_gib:
        # The tensor is freed at once, but torch keeps its pinned memory for the next tensor of this size: the swap
        # space that this process allocates when it becomes an engine.
        ranks, limit = config.tensor_parallel, host_resources.memory_limit()
        swap = host_memory.divide(config, weights=0, block_bytes=0, on_gpu=True, ranks=ranks, limit=limit).swap
        torch.empty(swap, dtype=torch.uint8, pin_memory=True)
        yield "pinned memory"
    gc.collect()
    gc.freeze()  # garbage collections during the activation skip the objects that exist now


def read_ahead(files: list[Path]) -> None:
    """Ask the kernel to have these files in its page cache.  Returns at once."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def rehearse(config: EngineConfig, directory: Path) -> None:
    """Compute a few tokens with one layer of the model and random weights.

    This imports the model's code, loads the CUDA modules of its kernels and creates the handles of CUDA libraries."""
    changes = overrides.parse(config.hf_overrides)
    described = overrides.merged(directory, overrides.load_config(directory, {}), changes)
    with tempfile.TemporaryDirectory(prefix="quire-spare-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(tiny(described)), encoding="utf-8")
        small = msgspec.structs.replace(
            config,
            model=folder,
            hf_overrides="",
            load="random",
            tensor_parallel=1,
            threads=1,
            kv_blocks=TINY_LEN // config.block_size + 2,
            max_model_len=TINY_LEN,
            max_seqs=4,
            step_tokens=64,
            graph_seconds=0.0,
            swap_memory_gib=0.0,
        )
        loggers = [logging.getLogger(name) for name in ("quire.engine.executor.local", "quire.engine.executor.worker")]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            executor = local.LocalExecutor(small)
            try:
                sampling = Sampling(temperature=0.5, ignore_eos=True)
                table = list(range(-(-40 // config.block_size)))
                prompt = Slice(0, 0, list(range(1, 33)), Sampler(sampling, 32, []))
                for plan in (StepPlan(1, starts=[Start(0, table)], slices=[prompt]), StepPlan(2)):
                    executor.submit(plan)
                    executor.collect()
            finally:
                executor.close()
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def tiny(described: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with one layer and a small vocabulary, otherwise unchanged."""
    found: dict[str, Any] = {}
    for key, value in described.items():
        if key == "per_layer_config":
            found[key] = {layer: fields for layer, fields in value.items() if int(layer) == 0}
        elif isinstance(value, dict):
            found[key] = tiny(value) if key == "text_config" else value
        elif key in ("num_hidden_layers", "n_layer", "num_layers"):
            found[key] = 1
        elif key == "num_kv_shared_layers":  # the only layer has no other layer to share with
            found[key] = 0
        elif key == "vocab_size":
            found[key] = min(value, TINY_VOCAB)
        elif key == "layer_types":
            found[key] = value[:1]
        elif key.endswith("_token_id") and not key.startswith(OTHER_TOKENS):
            found[key] = None
        else:
            found[key] = value
    return found
