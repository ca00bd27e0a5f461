"""Loads any causal language model of transformers, with our attention.

A model is served only if checks at load prove that it computes what transformers' own code computes:

    config          refuses architectures known to be different (encoder-decoders, layers without plain attention)
    weights         every tensor of the architecture is in the files; transformers would draw missing ones at random
    probe           a few small forwards, before and after submodules are replaced (`probe.py`)
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from quire.engine.executor.errors import ModelLoadError, UnsupportedModel, one_line
from quire.engine.executor.kv_cache import KVShape
from quire.engine.executor.lora.sites import Sites
from quire.engine.executor.models import multimodal, overrides, rope
from quire.engine.executor.models.cache_shapes import cached_layers
from quire.engine.executor.models.config_errors import field_reason
from quire.engine.executor.models.end_tokens import eos_ids
from quire.engine.executor.models.experts import report_plain_experts, use_own_experts
from quire.engine.executor.models.fused import ON_A_GPU, batch_dependence, fuse, is_fused
from quire.engine.executor.models.host_memory import returned_when_freed
from quire.engine.executor.models.linear import Linears
from quire.engine.executor.models.mtp import MtpHead, find_mtp
from quire.engine.executor.models.precision import check_dtype
from quire.engine.executor.models.probe import Proof, probe, prove_served
from quire.engine.executor.models.quantised.kv_scales import read_kv_scales
from quire.engine.executor.models.quantised.quantisation import method_of, quantisation_config
from quire.engine.executor.models.quantised.quantised_experts import (
    pack_experts,
    packs_experts,
    round_experts,
    widen_experts,
)
from quire.engine.executor.models.quantised.quantising import Quantising, check_kind
from quire.engine.executor.models.recurrent import families
from quire.engine.executor.models.recurrent.gated_attention import swap_attention
from quire.engine.executor.models.recurrent.plain_modules import swap_plain_modules
from quire.engine.executor.models.recurrent.proof import probe_recurrent, prove_recurrent
from quire.engine.executor.models.recurrent.states import StateShape
from quire.engine.executor.models.served_config import check_length, positions_of, read_config, served_part
from quire.engine.executor.models.sharding.shard_proof import random_shard
from quire.engine.executor.models.sharding.sharding import OPTION, fork_rng
from quire.engine.executor.models.sources import hub
from quire.engine.executor.models.sources.builtin import builtin
from quire.engine.executor.models.sources.demo import demo
from quire.engine.executor.models.weight_reader import check_adapter, check_files, names_of, read_weights
from quire.engine.executor.ranks.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

GPU_DTYPES = {torch.bfloat16, torch.float16}
# Models that Quire builds itself, by option value.
INCLUDED: dict[str, Callable[[], Path]] = {"": builtin, "builtin": builtin, "demo": demo}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run on its device, with the facts that the worker needs."""

    module: PreTrainedModel
    directory: Path
    dtype: torch.dtype
    layers: list[KVShape]  # KV shape of each layer, as cached
    vocab_size: int
    max_model_len: int  # tokens
    eos_ids: list[int]
    changes: dict[str, Any]  # settings besides the files that affect the logits, for the fingerprint
    batch_dependence: str  # why logits may depend, in the last bit, on the rest of the step; empty: they do not
    kv_scales: list[Tensor | None] | None  # KV scales per layer, for an e4m3 KV cache (`kv_scales.py`); None: all are 1
    states: list[StateShape]  # recurrent state of layers that have it; none: all layers are attention
    sites: Sites | None = None  # GEMMs to which LoRA adapters may add; None: no adapter is served
    windows: Sequence[int] = ()  # attention window of each layer in tokens; 0: all.  Empty: not known
    head: MtpHead | None = None  # MTP head that drafts; its layer is the last of `layers`

    @property
    def near_ties(self) -> bool:
        """Whether other tokens of a step may change a token's expert, because two router logits are almost equal."""
        return bool(self.batch_dependence) and has_experts(self.module.config)


def find(name: str) -> Path:
    """Return the local directory of a checkpoint: `name` itself if it is a path, else a snapshot from the hub.

    "demo" and "builtin" stand for the models that Quire makes by itself; "" means the built-in one.
    Raises ModelLoadError when there is no such directory, no such repository, or no network to fetch it.
    """
    if name in INCLUDED:
        return INCLUDED[name]()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ModelLoadError(f"{name}: no such directory")
    try:
        return hub.fetch(name)
    except ModelLoadError:
        raise
    except Exception as error:  # the hub client raises errors of its own, of httpx and OSError
        raise ModelLoadError(f"{name}: no such directory, and not found on the hub: {one_line(error)}") from error


@returned_when_freed()
def load_model(
    name: str,
    *,
    dtype: str,
    device: torch.device,
    max_model_len: int = 0,
    random: bool = False,
    deterministic: bool = False,
    hf_overrides: str = "",
    quantize: Literal["none", "int8", "fp8", "int4"] = "none",
    own_experts: bool = False,
    ranks: Ranks = ALONE,
    adapters: bool = False,
) -> LoadedModel:
    """Load `name` (a directory, a hub name, "demo" or "builtin") onto `device` and prove that it can be served.

      dtype          auto (the checkpoint's own), float32, bfloat16 or float16
      max_model_len  tokens; 0: the model's own maximum
        random         random weights, for measurements; tensors of weight files in the directory replace them
      deterministic  logits must not depend on the batch, to the last bit, even if that is slower
      hf_overrides   changes of config.json, a JSON object (`overrides.py`)
      quantize       quantise weights of linear layers to 8 or 4 bits (`quantised.py`); none: as in the checkpoint
      own_experts    compute experts of every mixture family with our kernels on a GPU (`experts.py`)
      ranks          this process holds one rank's shard (`sharding.py`)
      adapters       prepare the model for LoRA adapters; not with several ranks, nor in float32 on a GPU

    The kernels must be loaded.  Raises UnsupportedModel or ModelLoadError, with one line for the operator."""
    check_options(quantize, deterministic, device)
    check_adapter(directory := find(name))
    whole = read_config(directory, changes := overrides.parse(hf_overrides))
    check_files(directory, random=random)
    config = served_part(whole, directory, changes)
    families.check_ranks(config, ranks.size)
    names = names_of(config, part := config is not whole)
    max_model_len = check_length(config, max_model_len, overrides.load_config(directory, {}) if changes else None)
    quantising = Quantising(quantize, device, own_experts=own_experts)
    if random:
        module = random_model(directory, config, dtype, device, quantising, ranks)
    else:
        module = read_weights(directory, config, dtype, part=part, device=device, ranks=ranks, quantising=quantising)
    module = placed(module, config.model_type, device)
    fixed = rope.fix_angles(module, text := config.get_text_config(), positions_of(text), max_model_len)
    swap = {"ordered": deterministic, "own_experts": own_experts}
    adapters = adapters and ranks.size == 1 and (device.type == "cpu" or module.dtype.itemsize == 2)  # kernels' dtypes
    proved = prove(
        module, max_model_len, swap, adapters=adapters, quantises_activations=quantising.quantises_activations
    )
    return LoadedModel(
        module=module,
        directory=directory,
        dtype=module.dtype,
        max_model_len=max_model_len,
        eos_ids=eos_ids(module, directory, proved.vocab_size, changes),
        changes=changes | quantising.changes | unstored(fixed, max_model_len, random, ranks),
        batch_dependence=dependence_of(module, deterministic),
        kv_scales=None if random else read_kv_scales(directory, text.model_type, proved.layers, ranks, names),
        **proved._asdict(),
    )


def with_head(model: LoadedModel, why: str) -> LoadedModel:
    """Return a model with its checkpoint's MTP head, if there is one that can be computed (`mtp.py`).

    why: a reason against all drafts, or empty."""
    if (head := find_mtp(model.directory, model.module, why)) is None:
        return model
    scales = None if model.kv_scales is None else [*model.kv_scales, None]
    return replace(model, head=head, layers=[*model.layers, head.kv_shape], kv_scales=scales)


def placed(module: PreTrainedModel, kind: str, device: torch.device) -> PreTrainedModel:
    """Return a model on its device, ready to compute.  Raises UnsupportedModel for a dtype that no kernel has."""
    check_computed_dtype(kind, module.dtype, device)
    return module.to(device).eval().requires_grad_(False)


class Proved(NamedTuple):
    """What the comparison of a model with transformers has found."""

    layers: list[KVShape]  # KV shape that each layer caches
    states: list[StateShape]  # recurrent state of layers that have it
    vocab_size: int  # width of the logits
    sites: Sites | None  # LoadedModel.sites
    windows: Sequence[int]  # LoadedModel.windows


def prove(
    module: PreTrainedModel, max_model_len: int, swap: dict[str, bool], *, adapters: bool, quantises_activations: bool
) -> Proved:
    """Verify a model against transformers, and replace its submodules by ours.  Raises UnsupportedModel.

    swap      options of `swap_modules`
    adapters  find the GEMMs that LoRA adapters may add to; models with recurrent state support no adapters"""
    if families.is_recurrent(module.config):
        return prove_states(module, max_model_len, swap, quantises_activations=quantises_activations)
    proof = probe(module, max_model_len)
    layers = cached_layers(module.config.model_type, proof.layers, module.device)
    sites = Sites.of(module) if adapters else None
    swap_modules(module, max_model_len, decoder=layers == proof.layers, sites=sites, **swap)
    prove_swapped(module, proof._replace(layers=layers), sites, quantises_activations=quantises_activations)
    return Proved(layers, [], proof.vocab_size, sites, proof.windows)


def prove_states(
    module: PreTrainedModel, max_model_len: int, swap: dict[str, bool], *, quantises_activations: bool
) -> Proved:
    """Verify a model with recurrent layers against transformers, and replace these layers by our modules."""
    proof = probe_recurrent(module, max_model_len)
    layers = cached_layers(module.config.model_type, proof.layers, module.device)
    states = families.replace_layers(module)
    if module.device.type == "cuda":
        linears = Linears(ordered=False, dtype=module.dtype)
        if layers == proof.layers:  # heads are not padded
            swap_attention(module, max_model_len, linears)
        swap_plain_modules(module, linears)
    proof = proof._replace(layers=layers)
    swap_modules(module, max_model_len, decoder=False, sites=None, **swap)
    prove_recurrent(module, proof, states, quantises_activations=quantises_activations)
    return Proved(proof.layers, states, proof.vocab_size, None, ())


def swap_modules(
    module: PreTrainedModel,
    max_model_len: int,
    ordered: bool,
    *,
    decoder: bool,
    own_experts: bool,
    sites: Sites | None = None,
) -> None:
    """Replace modules that our kernels compute faster (`fuse`).  own_experts: also experts of decoders that `fuse`
    leaves."""
    fuse(module, max_model_len, ordered=ordered, decoder=decoder, sites=sites)
    if not is_fused(module):
        if own_experts:
            pack_experts(module)
        widen_experts(module)
    if module.device.type == "cuda" and not is_fused(module):
        use_own_experts(module) if own_experts else report_plain_experts(module)


def prove_swapped(module: PreTrainedModel, proof: Proof, sites: Sites | None, *, quantises_activations: bool) -> None:
    """Prove the swapped modules (`prove_served`), and that LoRA adapters can add to GEMMs in the model's own code."""
    with sites.proving(proof.ids.numel()) if sites is not None else contextlib.nullcontext():
        prove_served(module, proof, quantises_activations=quantises_activations)


def check_options(quantize: str, deterministic: bool, device: torch.device) -> None:
    """Raise UnsupportedModel for options that this device supports for no model: `quantize` without GEMMs for it, and
    `deterministic` on a GPU, where logits depend on the batch."""
    check_kind(quantize, device)
    if deterministic and device.type == "cuda":
        raise UnsupportedModel(f"--deterministic: {ON_A_GPU}; --device cpu can do it")


def dependence_of(module: PreTrainedModel, deterministic: bool) -> str:
    """Return why logits depend on the batch (`batch_dependence`).  Raises UnsupportedModel if `deterministic`."""
    dependence = batch_dependence(module)
    if deterministic and dependence:
        raise UnsupportedModel(f"{module.config.model_type}: --deterministic: {dependence}")
    return dependence


def has_experts(config: PretrainedConfig) -> bool:
    """Whether the language model of a config has mixture-of-experts layers."""
    counts = config.get_text_config().to_dict()
    return any("experts" in name and isinstance(count, int) and count > 1 for name, count in counts.items())


def unstored(fixed: bool, max_model_len: int, random: bool, ranks: Ranks) -> dict[str, object]:
    """Return the settings that affect a model's logits besides files and operator's changes.  fixed: result of
    `fix_angles`."""
    angles = when(fixed, "angles of a sequence of", max_model_len)
    return angles | when(random and ranks.size > 1, "ranks that made up weights", ranks.size)


def when(holds: bool, what: str, value: object) -> dict[str, object]:
    """Return {what: value} if `holds`, else {}."""
    return {what: value} if holds else {}


def check_computed_dtype(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedModel for a dtype that no kernel of the device computes with."""
    check_dtype(kind, dtype)
    if device.type == "cuda" and dtype not in GPU_DTYPES:
        raise UnsupportedModel(f"{kind}: {dtype} on a GPU; choose --dtype bfloat16 or float16")


def random_model(
    directory: Path,
    config: PretrainedConfig,
    dtype: str,
    device: torch.device,
    quantising: Quantising,
    ranks: Ranks = ALONE,
) -> PreTrainedModel:
    """Make the architecture with random initial weights from a fixed seed, on `device`.  If the config says mxfp4,
    experts are rounded to that.

    Tensors in weight files of the directory replace random ones.  Raises ModelLoadError for a tensor that the
    architecture does not have in this shape."""
    wanted = config.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype)
    if ranks.size > 1:
        if files := sorted(directory.glob("*.safetensors")):
            raise UnsupportedModel(f"--load random with {OPTION}: {files[0]} holds weights, which would not be used")
        return random_shard(config, wanted, device, ranks, quantising)
    try:
        with fork_rng(device), device:
            torch.manual_seed(0)
            own: Any = multimodal.served_class(config) if multimodal.loses_towers(config) else AutoModelForCausalLM
            make = own._from_config if multimodal.loses_towers(config) else own.from_config
            model: PreTrainedModel = make(config, dtype=wanted, attn_implementation=multimodal.attention_of(config))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # model classes raise any kind of error
        raise ModelLoadError(f"{directory}: {field_reason(config.to_dict(), error)}") from error
    set_stored(model, directory)
    if method_of(quantisation_config(directory) or {}) == "mxfp4" and packs_experts(device, wanted):
        round_experts(model)
    quantising.quantise(model)
    return model


def set_stored(model: PreTrainedModel, directory: Path) -> None:
    """Set weights of a model to the tensors in weight files of the directory.

    Leaves no reference to a weight, because quantising frees them one by one.  Raises ModelLoadError for a tensor that
    the model does not have in this shape."""
    made_up = model.state_dict()
    for file in sorted(directory.glob("*.safetensors")):
        try:
            given = load_file(file)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file}: {one_line(error)}") from error
        for name, tensor in given.items():
            if name not in made_up:
                raise ModelLoadError(f"{file}: {model.config.model_type} has no {name}")
            if tensor.shape != made_up[name].shape:
                shapes = f"{list(tensor.shape)}, the config says {list(made_up[name].shape)}"
                raise ModelLoadError(f"{file}: {name} has shape {shapes}")
            made_up[name].copy_(tensor)
