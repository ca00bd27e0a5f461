"""Any causal language model from transformers, through our attention.

A model is served only if it is proved, at load, to compute what its authors meant:

    config          names known to be different (encoder-decoders, layers that are not plain attention): refused
    weights         every tensor of the architecture is in the files; transformers would silently make up the rest
    probe           a few small forwards, before and after submodules are swapped (`probe.py`)
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from quire.engine.executor.errors import ModelLoadError, UnsupportedModel, one_line
from quire.engine.executor.kv_cache import KVShape
from quire.engine.executor.lora.sites import Sites
from quire.engine.executor.models import multimodal, overrides, rope, text_tower
from quire.engine.executor.models.bars import no_bars
from quire.engine.executor.models.cache_shapes import cached_layers
from quire.engine.executor.models.config_errors import field_reason
from quire.engine.executor.models.end_tokens import eos_ids
from quire.engine.executor.models.experts import report_plain_experts, use_own_experts
from quire.engine.executor.models.fused import ON_A_GPU, batch_dependence, fuse, is_fused
from quire.engine.executor.models.host_memory import returned_when_freed
from quire.engine.executor.models.precision import check_dtype, check_stored_dtypes
from quire.engine.executor.models.probe import Proof, probe, prove_served
from quire.engine.executor.models.quantised.kv_scales import read_kv_scales
from quire.engine.executor.models.quantised.plain_weights import PlainWeights, Weights
from quire.engine.executor.models.quantised.quantisation import read_quantisation
from quire.engine.executor.models.quantised.quantising import Quantising, check_kind
from quire.engine.executor.models.quantised.stored_weights import StoredWeights, in_this_thread
from quire.engine.executor.models.recurrent import families
from quire.engine.executor.models.recurrent.proof import probe_recurrent, prove_recurrent
from quire.engine.executor.models.recurrent.states import StateShape
from quire.engine.executor.models.sharding.shard_proof import plan as sharding_of
from quire.engine.executor.models.sharding.shard_proof import random_shard
from quire.engine.executor.models.sharding.sharding import OPTION, fork_rng, shard_class, stored_cuts
from quire.engine.executor.models.sources import hub
from quire.engine.executor.models.sources.builtin import builtin
from quire.engine.executor.models.sources.demo import demo
from quire.engine.executor.models.weights import Names, stored_tensors, weight_files
from quire.engine.executor.progress import Progress
from quire.engine.executor.ranks.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
GPU_DTYPES = {torch.bfloat16, torch.float16}
PLAIN_LAYERS = {"full_attention", "sliding_attention"}
ADAPTER_CONFIG = "adapter_config.json"
CHUNKED = "chunked_attention"  # sees the tokens of its own chunk only: all of them, in the first one
# Models that Quire makes by itself, by the names that options have for them.
INCLUDED: dict[str, Callable[[], Path]] = {"": builtin, "builtin": builtin, "demo": demo}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run on its device, with the facts that the worker needs."""

    module: PreTrainedModel
    directory: Path
    dtype: torch.dtype
    layers: list[KVShape]  # what each attention layer caches, read from its tensors
    vocab_size: int
    max_model_len: int  # tokens
    eos_ids: list[int]
    changes: dict[str, Any]  # what makes it compute something else than its files say, for the fingerprint
    batch_dependence: str  # why logits may depend, in the last bit, on the rest of the step; empty: they do not
    kv_scales: list[Tensor | None] | None  # KV scales per layer, for an e4m3 KV cache (`kv_scales.py`); None: all are 1
    states: list[StateShape]  # recurrent state of layers that have it; none: all layers are attention
    sites: Sites | None = None  # GEMMs that LoRA adapters may add to; None: no adapter is served
    windows: Sequence[int] = ()  # tokens that each layer sees; 0: all.  Empty: not known


def find(name: str) -> Path:
    """The local directory of a checkpoint: `name` itself if it is a path, else a snapshot from the hub.

    "demo" and "builtin" stand for the models that Quire makes by itself, and so does "", for the built-in one.
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
    except Exception as error:  # the hub client raises its own, httpx's and OSError's, as the weather is
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
      max_model_len  tokens; 0: what the model was made for
      random         make the weights up, for measurements; tensors of weight files in the directory replace them
      deterministic  logits must not depend on the batch, to the last bit, even if that is slower
      hf_overrides   changes of config.json, a JSON object (`overrides.py`)
      quantize       round weights of linear layers to 8 or 4 bits (`quantised.py`); none: as the checkpoint has them
      own_experts    compute experts of every mixture family with our kernels on a GPU (`experts.py`)
      ranks          this process holds one rank's part (`sharding.py`)
      adapters       prepare it for LoRA adapters; ranks take none

    The kernels must be loaded.  Raises UnsupportedModel or ModelLoadError, with one line for the operator."""
    check_options(quantize, deterministic, device)
    check_adapter(directory := find(name))
    whole = read_config(directory, changes := overrides.parse(hf_overrides))
    check_files(directory, random=random)
    config = served_part(whole, directory, changes)
    families.check_device(config, device, ranks.size)
    names = names_of(config, part := config is not whole)
    max_model_len = check_length(config, max_model_len, overrides.load_config(directory, {}) if changes else None)
    quantising = Quantising(quantize, device)
    if random:
        module = random_model(directory, config, dtype, device, quantising, ranks)
    else:
        module = read_weights(directory, config, dtype, part=part, device=device, ranks=ranks, quantising=quantising)
    module = placed(module, config.model_type, device)
    fixed = rope.fix_angles(module, text := config.get_text_config(), positions_of(text), max_model_len)
    swap = {"ordered": deterministic, "own_experts": own_experts}
    proved = prove(
        module, max_model_len, swap, adapters=adapters and ranks.size == 1, rounds_inputs=quantising.rounds_inputs
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


def placed(module: PreTrainedModel, kind: str, device: torch.device) -> PreTrainedModel:
    """Return a model on its device, ready to compute.  Raises UnsupportedModel for a dtype that no kernel has."""
    check_computed_dtype(kind, module.dtype, device)
    return module.to(device).eval().requires_grad_(False)


class Proved(NamedTuple):
    """What the proof of a model has found."""

    layers: list[KVShape]  # what each layer caches
    states: list[StateShape]  # recurrent state of layers that have it
    vocab_size: int  # width of the logits
    sites: Sites | None  # as in LoadedModel
    windows: Sequence[int]  # likewise


def prove(
    module: PreTrainedModel, max_model_len: int, swap: dict[str, bool], *, adapters: bool, rounds_inputs: bool
) -> Proved:
    """Prove a model and swap its submodules.  swap: as of `swap_modules`.  Raises UnsupportedModel.

    adapters: find the GEMMs that LoRA adapters may add to; models with recurrent state take none."""
    if families.is_recurrent(module.config):
        return prove_states(module, max_model_len, swap, rounds_inputs=rounds_inputs)
    proof = probe(module, max_model_len)
    layers = cached_layers(module.config.model_type, proof.layers, module.device)
    sites = Sites.of(module) if adapters else None
    swap_modules(module, max_model_len, decoder=layers == proof.layers, sites=sites, **swap)
    prove_swapped(module, proof._replace(layers=layers), sites, rounds_inputs=rounds_inputs)
    return Proved(layers, [], proof.vocab_size, sites, proof.windows)


def prove_states(module: PreTrainedModel, max_model_len: int, swap: dict[str, bool], *, rounds_inputs: bool) -> Proved:
    """Prove a model with recurrent layers, and put our modules in their place."""
    proof = probe_recurrent(module, max_model_len)
    states = families.replace_layers(module)
    swap_modules(module, max_model_len, decoder=False, sites=None, **swap)
    prove_recurrent(module, proof, states, rounds_inputs=rounds_inputs)
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
    """Swap what our kernels compute faster (`fuse`).  own_experts: also experts of decoders that stay transformers'."""
    fuse(module, max_model_len, ordered=ordered, decoder=decoder, sites=sites)
    if module.device.type == "cuda" and not is_fused(module):
        use_own_experts(module) if own_experts else report_plain_experts(module)


def prove_swapped(module: PreTrainedModel, proof: Proof, sites: Sites | None, *, rounds_inputs: bool) -> None:
    """Prove the swapped modules (`prove_served`), and that layers of the model's own code can take adapters."""
    with sites.proving(proof.ids.numel()) if sites is not None else contextlib.nullcontext():
        prove_served(module, proof, rounds_inputs=rounds_inputs)


def check_options(quantize: str, deterministic: bool, device: torch.device) -> None:
    """Raise UnsupportedModel for what this device does with no model: not all have GEMMs of every kind, and on a
    GPU logits always depend on the batch."""
    check_kind(quantize, device)
    if deterministic and device.type == "cuda":
        raise UnsupportedModel(f"--deterministic: {ON_A_GPU}; --device cpu can do it")


def dependence_of(module: PreTrainedModel, deterministic: bool) -> str:
    """Why logits depend on the batch (`batch_dependence`).  Raises UnsupportedModel where they must not."""
    dependence = batch_dependence(module)
    if deterministic and dependence:
        raise UnsupportedModel(f"{module.config.model_type}: --deterministic: {dependence}")
    return dependence


def unstored(fixed: bool, max_model_len: int, random: bool, ranks: Ranks) -> dict[str, object]:
    """Return what decides a model's logits apart from files and operator's changes.  fixed: as of `fix_angles`."""
    angles = when(fixed, "angles of a sequence of", max_model_len)
    return angles | when(random and ranks.size > 1, "ranks that made up weights", ranks.size)


def when(holds: bool, what: str, value: object) -> dict[str, object]:
    """Return one entry, or none."""
    return {what: value} if holds else {}


def check_computed_dtype(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedModel for a type of values that no kernel of the device computes with."""
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
    """Make the architecture with the weights that its own training would begin with, on `device`, from a fixed seed.

    Weight files of the directory may hold some of the tensors; those are used.  Raises ModelLoadError for a tensor that
    the architecture does not have in this shape."""
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
    except Exception as error:  # model classes raise whatever their authors liked
        raise ModelLoadError(f"{directory}: {field_reason(config.to_dict(), error)}") from error
    made_up = model.state_dict()
    for file in sorted(directory.glob("*.safetensors")):
        try:
            given = load_file(file)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file}: {one_line(error)}") from error
        for name, tensor in given.items():
            if name not in made_up:
                raise ModelLoadError(f"{file}: {config.model_type} has no {name}")
            if tensor.shape != made_up[name].shape:
                shapes = f"{list(tensor.shape)}, the config says {list(made_up[name].shape)}"
                raise ModelLoadError(f"{file}: {name} has shape {shapes}")
            made_up[name].copy_(tensor)
    quantising.quantise(model)
    return model


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
    """The model of a checkpoint, on the host, complete; `part`: of a multimodal one, its text part.

    ranks: of several, only what this one holds, for `device`.  quantising: makes int8, fp8 or int4 linear layers; None:
    all weights become plain ones.  Raises ModelLoadError."""
    if dtype == "auto":
        check_dtype(config.model_type, config.dtype)
    names = names_of(config, part)
    if how := read_quantisation(directory, config.model_type):
        wanted = (config.dtype or torch.bfloat16) if dtype == "auto" else getattr(torch, dtype)
        stored = StoredWeights(directory, config, how, names)
        model = read_tensors(directory, config, wanted, stored, device=device, ranks=ranks, quantising=quantising)
        if quantising is None or not (quantising.kept or quantising.kind):
            log.info("weights quantised by %s are dequantised to %s, so they take its memory", how.method, wanted)
        return model
    check_stored_dtypes(directory, config, names)
    # With PEFT installed, transformers' reader would look for the adapter that such a file describes.
    merged = (directory / ADAPTER_CONFIG).exists()
    if ranks.size == 1 and not merged and any((directory / name).exists() for name in (hub.WHOLE, hub.INDEX)):
        return read_whole(directory, config, dtype, quantising, names, part=part)
    weights = PlainWeights(directory, names)
    wanted = (config.dtype or weights.dtype) if dtype == "auto" else getattr(torch, dtype)
    return read_tensors(directory, config, wanted, weights, device=device, ranks=ranks, quantising=quantising)


def names_of(config: PretrainedConfig, part: bool) -> Names:
    """Return how names of tensors become those of the served model; part: that is the text part, by `text_tower`."""
    if not part and multimodal.loses_towers(config):
        return multimodal.names_of(config)
    return text_tower.names_of(part)


def read_whole(
    directory: Path, config: PretrainedConfig, dtype: str, quantising: Quantising | None, names: Names, *, part: bool
) -> PreTrainedModel:
    """The model of a checkpoint that is not quantised, by transformers' own reader, which finds files by their
    usual names only.  Raises ModelLoadError."""
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
                ignore_mismatched_sizes=True,  # they are refused below, by name
                trust_remote_code=False,
                key_mapping=text_tower.RENAMED if part else None,
            )
    except Exception as error:  # config and model classes raise whatever their authors liked
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
    """The model that these weights make, or a rank's part of it, tensor by tensor.  Raises ModelLoadError."""
    own = multimodal.served_class(config)
    sharding = sharding_of(config, device, ranks)
    cuts = stored_cuts(config.model_type, sharding, weights.names, own.base_model_prefix)
    if quantising is None:
        quantising = Quantising("none", CPU)
    else:
        quantising.keep(weights.exact_modules(cuts), dtype)
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
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
            report["unexpected_keys"] -= weights.without_meaning(report["unexpected_keys"], tensors)
        weights.check(module)
        if (directory / "generation_config.json").is_file():
            module.generation_config = GenerationConfig.from_pretrained(directory)
    except ModelLoadError:
        raise
    except Exception as error:  # config and model classes raise whatever their authors liked
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
    if unused := sorted(name for name in report["unexpected_keys"] if not drafts(name, further)):
        reason = "which the model of this config does not use"
        raise UnsupportedModel(f"{config.model_type}: the weight files hold {some(unused)}, {reason}")


def drafts(name: str, further: range) -> bool:
    """Whether a tensor is of a head that drafts further tokens: stored as a layer after the last one, or as `mtp`."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return bool((layer and int(layer[1]) in further) or re.search(r"(^|\.)mtp\b", name))


def some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@contextlib.contextmanager
def report_progress(directory: Path, sizes: dict[str, int] | None = None) -> Iterator[None]:
    """Log how many bytes of weights transformers has read, in place of its own progress bar.

    sizes: bytes of each weight, where the files have other names."""
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


def read_config(directory: Path, changes: dict[str, Any] | None = None) -> PretrainedConfig:
    """The config of a checkpoint with the operator's changes.  Raises UnsupportedModel for an unknown quantisation."""
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{directory}: no config.json")
    config = overrides.load_config(directory, changes or {})
    text = config.get_text_config()
    if not hasattr(text, "vocab_size"):
        raise UnsupportedModel(f"{config.model_type}: its config has no vocab_size, so it is no language model")
    read_quantisation(directory, config.model_type)
    for described in (config, text):
        if named := getattr(described, "transformers_weights", None):
            reason = "which is not read; name it model.safetensors, or list it in model.safetensors.index.json"
            raise UnsupportedModel(f"{directory}/config.json: transformers_weights names {named}, {reason}")
        vars(described).pop("quantization_config", None)  # transformers need not know: the weights are dequantised
    padding = getattr(text, "pad_token_id", None)
    if padding is not None and not 0 <= padding < text.vocab_size:
        text.pad_token_id = None  # torch refuses such a token; no batch is padded here
    return config


def served_part(whole: PretrainedConfig, directory: Path, changes: dict[str, Any] | None = None) -> PretrainedConfig:
    """The config of what is served: the text part of a multimodal model, else the whole.

    changes: the operator's, which `whole` has.  Raises UnsupportedModel, and ModelLoadError for changes without
    effect."""
    if changes:
        check_effect(directory, changes)
    if not text_tower.has_tower(whole):
        check_architecture(whole)
        if multimodal.loses_towers(whole):
            text_tower.lend_fields(whole, whole.get_text_config())
        without_temperature(whole.get_text_config())
        return whole
    text = text_tower.text_config(whole, directory)
    try:
        check_architecture(text)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{whole.model_type}: its text part: {error}") from None
    return without_temperature(text)


def check_effect(directory: Path, changes: dict[str, Any]) -> None:
    """Raise ModelLoadError for a change of the operator's that leaves the served model as it is.

    Such are fields of a part that is not loaded, and what weight files decide.  `eos_ids` reads its field by itself."""
    whole, served = fields_of(directory, changes)
    for path, others in overrides.each_left_out(changes, overrides.load_config(directory, {})):
        if path.endswith("eos_token_id"):
            continue
        try:
            whole_without, served_without = fields_of(directory, others)
        except ModelLoadError:  # without it there is no model
            continue
        if whole != whole_without and served == served_without:
            raise ModelLoadError(f"{overrides.OPTION}: {path} changes nothing of the model that is served")


def fields_of(directory: Path, changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a checkpoint's config with these changes, and of the config of what is served."""
    whole = overrides.load_config(directory, changes).to_dict()
    return whole, multimodal.text_fields(served_part(read_config(directory, changes), directory))


def without_temperature(text: PretrainedConfig) -> PretrainedConfig:
    """Switch off what changes nothing within `plain_positions`, and takes positions from the place in the batch."""
    if hasattr(text, "attn_temperature_tuning"):
        text.attn_temperature_tuning = False
    return text


def check_architecture(config: PretrainedConfig) -> None:
    """Refuse, before any weight is read, what is known to compute something else than causal paged attention."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{kind}: an encoder-decoder; only decoder-only language models are served")
    if multimodal.class_of(config) is None:
        raise UnsupportedModel(f"{kind}: transformers has no class of this type that generates text")
    text = config.get_text_config()
    if multimodal.loses_towers(config) and text is not config:
        kind = f"{kind}: its text part, {text.model_type}"
    kinds = set(getattr(text, "layer_types", None) or [])
    if getattr(text, "cross_attention_layers", None):  # mllama
        kinds.add("cross_attention")
    if odd := sorted(kinds - PLAIN_LAYERS - {CHUNKED} - families.known_kinds(text)):
        raise UnsupportedModel(f"{kind}: layers of type {odd[0]}; only full and sliding-window attention are computed")
    if not (multimodal.passes_attention(config) or families.known_kinds(text)):  # these are watched at load
        raise UnsupportedModel(f"{kind}: computes attention by itself, past the interface our kernels plug into")
    if getattr(text, "alibi", False):
        raise UnsupportedModel(f"{kind}: ALiBi position bias")


def positions_of(text: PretrainedConfig) -> int:
    """For how many positions a model was made, by its config; 0 where that does not say."""
    return getattr(text, "max_position_embeddings", None) or 0


def plain_positions(text: PretrainedConfig) -> tuple[int, str] | None:
    """How many positions have plain attention, and what ends them; None: all.

    In Llama 4: one chunk, while its temperature is one."""
    bounds = []
    if CHUNKED in (getattr(text, "layer_types", None) or []):
        bounds.append((int(text.attention_chunk_size), "the first chunk of its attention"))
    if hasattr(text, "attn_temperature_tuning"):
        bounds.append((int(text.floor_scale) - 1, "the positions before its attention's temperature changes"))
    return min(bounds, default=None)


def check_length(config: PretrainedConfig, asked: int, own: PretrainedConfig | None = None) -> int:
    """max_model_len: `asked`, or what the model was made for.

    Raises ModelLoadError when asked for more than rope scaling reaches.  `own`: the config before the operator's
    changes."""
    text = config.get_text_config()
    made_for, plain = positions_of(text), plain_positions(text)
    if not made_for:
        raise UnsupportedModel(f"{config.model_type}: the config does not say for how many positions it was made")
    most = rope.reach(text, made_for, own and own.get_text_config())
    hint = f"; {overrides.OPTION} with rope scaling extends models with rotary embeddings"
    if plain is not None:
        made_for = min(made_for, plain[0])
        if plain[0] <= most:
            most, hint = plain[0], f"; it is served within {plain[1]}"
    if asked > most:
        raise ModelLoadError(f"max_model_len {asked} is over the {most} positions {config.model_type} can serve{hint}")
    return asked or rope.short_reach(text, made_for)


def check_adapter(directory: Path) -> None:
    """Raise UnsupportedModel for weights of an adapter (LoRA and others, by PEFT), alone or next to those of a model.

    Without weights adapter_config.json is left over from an adapter that was merged: then log a warning."""
    if weights := sorted(directory.glob("adapter_model*")):
        reason = "an adapter, which is not applied; serve its model with the adapter merged, and without this file"
        raise UnsupportedModel(f"{weights[0]}: {reason}")
    if (file := directory / ADAPTER_CONFIG).is_file():
        log.warning("%s is not read: no adapter is applied; the weights must have it merged", file)


def check_files(directory: Path, *, random: bool = False) -> None:
    """Open every weight file, unless weights are made up.

    Raises ModelLoadError naming one that is truncated or damaged, or an empty weight."""
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
