"""Reads a checkpoint's weights into a model of transformers: by transformers' own reader, or tensor by tensor if they
are quantised or sharded."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from quire.engine.executor.errors import ModelLoadError, UnsupportedModel, one_line
from quire.engine.executor.models import multimodal, text_tower
from quire.engine.executor.models.config_errors import field_reason
from quire.engine.executor.models.precision import check_dtype, check_stored_dtypes
from quire.engine.executor.models.progress_bars import no_bars
from quire.engine.executor.models.quantised.plain_weights import PlainWeights, Weights
from quire.engine.executor.models.quantised.quantisation import read_quantisation
from quire.engine.executor.models.quantised.quantising import Quantising
from quire.engine.executor.models.quantised.stored_weights import StoredWeights, in_this_thread
from quire.engine.executor.models.sharding.shard_proof import plan as sharding_of
from quire.engine.executor.models.sharding.sharding import shard_class, stored_cuts
from quire.engine.executor.models.sources import hub
from quire.engine.executor.models.weights import Names, stored_tensors, weight_files
from quire.engine.executor.progress import Progress
from quire.engine.executor.ranks.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
ADAPTER_CONFIG = "adapter_config.json"


def read_weights(
    directory: Path,
    config: PretrainedConfig,
    dtype: str,
    *,
    part: bool = False,
    device: torch.device = CPU,
    ranks: Ranks = ALONE,
    quantising: Quantising | None = None,
) -> PreTrainedModel:
    """Return the model of a checkpoint with all weights, on the host. part: read only the language model of a
    multimodal checkpoint.

    ranks: with several, read only the shard of this rank, for `device`.  quantising: makes int8, fp8 or int4 linear
    layers; None: all weights are dequantised.  Raises ModelLoadError."""
    if dtype == "auto":
        check_dtype(config.model_type, config.dtype)
    names = names_of(config, part)
    if how := read_quantisation(directory, config.model_type):
        wanted = (config.dtype or torch.bfloat16) if dtype == "auto" else getattr(torch, dtype)
        stored = StoredWeights(directory, config, how, names)
        model = read_tensors(directory, config, wanted, stored, device=device, ranks=ranks, quantising=quantising)
        if quantising is None or not (quantising.kept or quantising.keeps_experts or quantising.kind):
            log.info("weights quantised by %s are dequantised to %s and take its memory", how.method, wanted)
        return model
    check_stored_dtypes(directory, config, names)
    # With PEFT installed, transformers' reader would look for the adapter that this file describes.
    merged = (directory / ADAPTER_CONFIG).exists()
    if ranks.size == 1 and not merged and any((directory / name).exists() for name in (hub.WHOLE, hub.INDEX)):
        return read_whole(directory, config, dtype, quantising, names, part=part)
    weights = PlainWeights(directory, names)
    wanted = (config.dtype or weights.dtype) if dtype == "auto" else getattr(torch, dtype)
    return read_tensors(directory, config, wanted, weights, device=device, ranks=ranks, quantising=quantising)


def names_of(config: PretrainedConfig, part: bool) -> Names:
    """Return the mapping of names in the files to the served model's; part: a language model is served, by
    `text_tower`."""
    if not part and multimodal.loses_towers(config):
        return multimodal.names_of(config)
    return text_tower.names_of(part)


def read_whole(
    directory: Path, config: PretrainedConfig, dtype: str, quantising: Quantising | None, names: Names, *, part: bool
) -> PreTrainedModel:
    """Return the model of an unquantised checkpoint, read by transformers' own reader, which finds files by their usual
    names only.  Raises ModelLoadError."""
    rounding = quantising if quantising is not None and quantising.kind else None
    by_class = rounding or multimodal.loses_towers(config)
    own: Any = multimodal.served_class(config) if by_class else AutoModelForCausalLM
    try:
        with report_progress(directory), in_this_thread() if rounding else contextlib.nullcontext():
            module, report = (rounding.while_loading(own) if rounding else own).from_pretrained(
                directory,
                config=config,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                attn_implementation=multimodal.attention_of(config),
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # mismatches are refused below, by name
                trust_remote_code=False,
                key_mapping=text_tower.RENAMED if part else None,
            )
    except Exception as error:  # config and model classes raise any kind of error
        raise ModelLoadError(f"{directory}: {field_reason(config.to_dict(), error)}") from error
    report["unexpected_keys"] = {name for name in report["unexpected_keys"] if names.own(name)}
    check_report(directory, config, report)
    if rounding:
        rounding.settle(module, own)
    model: PreTrainedModel = module
    return model


def read_tensors(
    directory: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    weights: Weights,
    *,
    device: torch.device,
    ranks: Ranks,
    quantising: Quantising | None,
) -> PreTrainedModel:
    """Return the model with these weights, or a rank's shard of it, read tensor by tensor.  Raises ModelLoadError."""
    own = multimodal.served_class(config)
    sharding = sharding_of(config, device, ranks)
    cuts = stored_cuts(config.model_type, sharding, weights.names, own.base_model_prefix)
    if quantising is None:
        quantising = Quantising("none", CPU)
    else:
        quantising.keep(exact := weights.exact_modules(cuts), dtype)
        quantising.keep_experts(weights.rows_of_experts(cuts, exact))
    quantising.divide(sharding.divided_rows, ranks)
    one_by_one = not isinstance(weights, PlainWeights) or quantising.kind is not None
    try:
        with (
            report_progress(directory, weights.sizes),
            in_this_thread() if one_by_one else contextlib.nullcontext(),
            weights.opened(cuts, dtype, quantising) as tensors,
        ):
            module, report = quantising.while_loading(shard_class(own, sharding)).from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation=multimodal.attention_of(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # mismatches are refused below, by name
            )
            report["unexpected_keys"] -= weights.without_meaning(report["unexpected_keys"], tensors)
        weights.check(module)
        if (directory / "generation_config.json").is_file():
            module.generation_config = GenerationConfig.from_pretrained(directory)
    except ModelLoadError:
        raise
    except Exception as error:  # config and model classes raise any kind of error
        raise ModelLoadError(f"{directory}: {field_reason(config.to_dict(), error)}") from error
    check_report(directory, config, report)
    quantising.settle(module, own)
    sharding.connect(module, ranks)
    model: PreTrainedModel = module
    return model


def check_report(directory: Path, config: PretrainedConfig, report: dict[str, Any]) -> None:
    """Raise ModelLoadError or UnsupportedModel unless the files and the architecture have the same tensors."""
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(f"{directory}: the weight files lack {some(missing)}")
    if report["mismatched_keys"]:
        key, found, wanted = min(report["mismatched_keys"])
        raise ModelLoadError(f"{directory}: {key} has shape {list(found)}, the config says {list(wanted)}")
    text = config.get_text_config()
    first = text.num_hidden_layers
    further = range(first, first + (getattr(text, "num_nextn_predict_layers", None) or 0))
    heads = {name for name in report["unexpected_keys"] if drafts(name, further)}
    if unused := sorted(report["unexpected_keys"] - heads):
        reason = "which the model of this config does not use"
        raise UnsupportedModel(f"{config.model_type}: the weight files hold {some(unused)}, {reason}")
    if heads:
        log.info("draft heads of this family are not used: %s", some(sorted(heads)))


def drafts(name: str, further: range) -> bool:
    """Whether a tensor belongs to a multi-token-prediction (MTP) head: a layer after the last one, or named `mtp`."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return bool((layer and int(layer[1]) in further) or re.search(r"(^|\.)mtp\b", name))


def some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@contextlib.contextmanager
def report_progress(directory: Path, sizes: dict[str, int] | None = None) -> Iterator[None]:
    """Log how many bytes of weights transformers has read, in place of its own progress bar.

    sizes: bytes of each weight by the model's names; None: the files have these names and sizes."""
    sizes = sizes or {name: stored.bytes for name, stored in stored_tensors(weight_files(directory)).items()}
    total, began = sum(sizes.values()), time.monotonic()
    progress = Progress(log.info, "reading weights", total, in_bytes=True)

    def counted(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in tensors:
            yield name, tensor
            progress.advance(sizes.get(name, 0))

    with no_bars(counted):
        yield
    log.info("read %.0f MB of weights in %.1f s from %s", total / 1e6, time.monotonic() - began, directory)


def check_adapter(directory: Path) -> None:
    """Raise UnsupportedModel for weights of a PEFT adapter (LoRA and others), alone or next to a model's weights.

    An adapter_config.json without adapter weights is left over from a merged adapter: it only logs a warning."""
    if weights := sorted(directory.glob("adapter_model*")):
        reason = "an adapter, which is not applied; serve its model with the adapter merged, and without this file"
        raise UnsupportedModel(f"{weights[0]}: {reason}")
    if (file := directory / ADAPTER_CONFIG).is_file():
        log.warning("%s is not read: no adapter is applied; the weights must have it merged", file)


def check_files(directory: Path, *, random: bool = False) -> None:
    """Open every weight file, unless weights are random.

    Raises ModelLoadError that names a truncated or damaged file, or an empty weight."""
    if random:
        return
    files = weight_files(directory)
    for file in files:
        try:
            with safe_open(file, "pt"):  # reads the header and compares it with the file's size
                pass
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file}: {one_line(error)}") from error
    for stored in stored_tensors(files).values():
        if not stored.bytes and stored.name.endswith("weight"):
            why = "holds no values, as placeholders of sharded training (ZeRO-3) do; save the gathered weights"
            raise ModelLoadError(f"{stored.file}: {stored.name} of shape {list(stored.shape)} {why}")
