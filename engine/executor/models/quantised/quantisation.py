"""Reads how a checkpoint's weights are quantised, from its config.json or from hf_quant_config.json (NVIDIA ModelOpt).

    quant_method         weights                                              what differs between checkpoints
    fp8                  e4m3, a scale for each block of 128x128, or for all   DeepSeek, Qwen3-FP8
    compressed-tensors   e4m3 or int8, or 4 or 8 bits packed into int32        scale for all, a row, a block, a group
    compressed-tensors   e2m1 (NVFP4, MXFP4)                                   scales of 16 or 32 columns
    modelopt             e4m3, or e2m1 (NVFP4)                                 scale for all or each row; of 16 columns
    awq, gptq            4 bits (gptq: or 8) packed into int32                 group size, order of columns
    mxfp4                e2m1, a power of two for each 32                      experts of gpt-oss

Other methods and settings are refused by name.  `stored_weights.py` finds the tensors, `dequantise.py` computes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quire.engine.executor.errors import ModelLoadError, UnsupportedModel, one_line

Format = Literal["scaled", "packed", "awq", "gptq", "mxfp4", "fp4"]
Strategy = Literal["tensor", "channel", "group", "block"]
COMPRESSED_FORMATS = {"float-quantized", "int-quantized", "naive-quantized", "pack-quantized"}
# e2m1 formats of compressed-tensors -> scale granularity, columns per scale, tensors that only this format has.
FP4_FORMATS: dict[str, tuple[str, int, frozenset[str]]] = {
    "nvfp4-pack-quantized": ("tensor_group", 16, frozenset({"global_scale"})),
    "mxfp4-pack-quantized": ("group", 32, frozenset()),
}
RULE_FIELDS = {"bits", "group_size", "sym", "desc_act"}  # fields of a rule in GPTQ's `dynamic`
MODELOPT_STRATEGIES: dict[str, Strategy] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}
MODELOPT_FP4 = {"NVFP4", "W4A16_NVFP4"}  # NVFP4 with e2m1 activations and without
MODELOPT_FP4_GROUP = 16  # columns that share a scale, unless the config says otherwise


class Unread(Exception):
    """The first unsupported property of a quantisation config, in a few words."""


@dataclass(frozen=True)
class Quantisation:
    """How the quantised weights of a checkpoint are stored.  A weight is [out, in]."""

    method: str  # quantisation method, as the config names it
    format: Format  # scaled: one 8-bit value per byte; the others pack several values into one word
    strategy: Strategy  # scale granularity: per tensor, row (output channel), `group` columns of a row, or block
    bits: int
    group: int = 0  # columns; 0: all of a row
    block: tuple[int, int] = (0, 0)  # rows and columns
    zero_shift: int = 0  # added to a stored zero point
    quantises_activations: bool = False  # activations are quantised to 8 bits, too
    ignored: tuple[str, ...] = ()  # names of modules that are not quantised; "re:": a regular expression
    demanded: frozenset[str] = frozenset()  # required kinds of stored tensors per weight, besides those of the format

    def ignores(self, module: str, whole: Sequence[str] = ()) -> bool:
        """Return whether the config names `module` as not quantised.

        whole: names of `module` in the complete multimodal model, in several versions of transformers.  A regular
        expression must match all of these names, because it is not known for which version it was written:
        `^(?!.*language_model)` matches vision towers in one version, and the language model in another."""
        return any(
            all(re.match(name.removeprefix("re:"), each) for each in whole or [module])
            if name.startswith("re:")
            else name == module
            for name in self.ignored
        )

    def renamed(self, own: Callable[[str], str]) -> Quantisation:
        """Return a copy whose ignored modules have `own` names, instead of names in the files.  Regular expressions
        stay."""
        changed = [name if name.startswith("re:") else own(f"{name}.").removesuffix(".") for name in self.ignored]
        return replace(self, ignored=tuple(changed))


def read_quantisation(directory: Path, kind: str) -> Quantisation | None:
    """Return how the weights of a checkpoint are quantised; None: they are not.

    kind: the model type, for messages.  Raises UnsupportedModel, naming the method, and ModelLoadError for a config
    that cannot be read."""
    described = quantisation_config(directory)
    if described is None:
        return None
    method = method_of(described)
    reader = CONFIG_READERS.get(method)
    try:
        if reader is None:
            raise Unread(str(described.get("quant_algo") or ""))
        if method == "mxfp4" and kind != "gpt_oss":
            raise Unread("of another model than gpt_oss")
        how = reader(described)
        for name in how.ignored:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        return how
    except Unread as error:
        named = (method or "an unnamed method") + (f" ({error})" if str(error) else "")
        reason = "which is not implemented; serve an unquantised copy"
        raise UnsupportedModel(f"{kind}: weights quantised by {named}, {reason}") from None
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise ModelLoadError(f"{directory}: the quantisation config is not understood: {one_line(error)}") from error


def quantisation_config(directory: Path) -> dict[str, Any] | None:
    """Return the quantisation config in a checkpoint's files; None: there is none.  Raises ModelLoadError."""
    file = directory / "config.json"
    try:
        config = json.loads(file.read_bytes())
        for place in (config, config.get("text_config") or {}):
            for name in ("quantization_config", "compression_config"):
                if place.get(name) is not None:
                    return dict(place[name])
        file = directory / "hf_quant_config.json"
        if file.is_file():
            described = json.loads(file.read_bytes())
            return dict(described["quantization"], producer=described.get("producer"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{file}: {one_line(error)}") from error
    return None


def method_of(described: dict[str, Any]) -> str:
    """Return the name of the method, in lower case; empty: there is none."""
    producer = described.get("producer")
    method = described.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None)
    return str(method or "").lower()


def _read_fp8(described: dict[str, Any]) -> Quantisation:
    if described.get("expert_dtype", "fp8") != "fp8":
        raise Unread(f"experts in {described['expert_dtype']}")
    if described.get("fmt", "e4m3") != "e4m3":
        raise Unread(str(described["fmt"]))
    ignored = described.get("modules_to_not_convert") or described.get("ignored_layers") or ()
    block, rounds = described.get("weight_block_size"), bool(described.get("activation_scheme", "dynamic"))
    if block is None:
        return Quantisation("fp8", "scaled", "tensor", 8, ignored=tuple(ignored), quantises_activations=rounds)
    return Quantisation(
        "fp8", "scaled", "block", 8, block=_pair(block), ignored=tuple(ignored), quantises_activations=rounds
    )


def _read_compressed(described: dict[str, Any]) -> Quantisation:
    groups = list(described["config_groups"].values())
    if not groups:
        raise Unread("without weights")
    formats = {group.get("format") or described.get("format") for group in groups}
    kinds = [group["weights"] for group in groups]
    if len(formats) != 1 or any(_kind(kind) != _kind(kinds[0]) for kind in kinds):
        raise Unread("groups of several kinds")
    (stored,) = formats
    if stored not in COMPRESSED_FORMATS and stored not in FP4_FORMATS:
        raise Unread(str(stored))
    if (described.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise Unread("sparse weights")
    if (described.get("transform_config") or {}).get("config_groups"):
        raise Unread("transform_config: rotations of activations and weights")
    ignored = tuple(described.get("ignore") or ())
    if stored in FP4_FORMATS:
        return _compressed_fp4(str(stored), kinds[0], ignored)
    bits, number, strategy, group, block, demanded = _kind(kinds[0])
    packed = stored == "pack-quantized"
    if number not in ("int", "float") or bits not in ((4, 8) if packed else (8,)) or (packed and number == "float"):
        raise Unread(f"{stored}: {number} of {bits} bits")
    if strategy not in (("channel", "group") if packed else ("tensor", "channel", "block")):
        raise Unread(f"{stored}, {strategy}")
    return Quantisation(
        "compressed-tensors",
        "packed" if packed else "scaled",
        strategy,
        bits,
        group=_positive(group) if strategy == "group" else 0,
        block=_pair(block) if strategy == "block" else (0, 0),
        ignored=ignored,
        quantises_activations=all(group.get("input_activations") for group in groups),
        demanded=demanded,
    )


def _compressed_fp4(stored: str, weights: dict[str, Any], ignored: tuple[str, ...]) -> Quantisation:
    """Read weights in e2m1.  The config may ask for e2m1 activations, too; here activations keep the model's dtype."""
    bits, number, strategy, group, _block, demanded = _kind(weights)
    if (bits, number) != (4, "float") or demanded:
        raise Unread(", ".join([f"{stored}: {number} of {bits} bits", *sorted(demanded)]))
    shared, columns, parts = FP4_FORMATS[stored]
    if (strategy, group) != (shared, columns):
        raise Unread(f"{stored}, {strategy} of {group}")
    return Quantisation("compressed-tensors", "fp4", "group", 4, group=columns, ignored=ignored, demanded=parts)


def _kind(weights: dict[str, Any]) -> tuple[int, str, Any, Any, Any, frozenset[str]]:
    """Return bits, type, strategy, group size, block and required tensors of compressed-tensors' weights."""
    group, block = weights.get("group_size"), weights.get("block_structure")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    demanded = {"zero_point"} if weights.get("symmetric") is False else set()
    order = weights.get("actorder")
    if strategy == "group" and (order is True or str(order).lower() in ("group", "dynamic")):
        demanded.add("g_idx")
    return int(weights["num_bits"]), str(weights["type"]), strategy, group, block, frozenset(demanded)


def _read_modelopt(described: dict[str, Any]) -> Quantisation:
    algorithm = described.get("quant_algo")
    if algorithm not in MODELOPT_STRATEGIES and algorithm not in MODELOPT_FP4:
        raise Unread(str(algorithm or ""))
    ignored = described.get("ignore") or described.get("exclude_modules") or ()
    # Shell patterns: a star matches any text.
    patterns = tuple("re:" + re.escape(name).replace(r"\*", ".*") + "$" if "*" in name else name for name in ignored)
    if algorithm in MODELOPT_FP4:
        group = _positive(described.get("group_size") or MODELOPT_FP4_GROUP)
        parts = frozenset({"scale_2"})
        return Quantisation("modelopt", "fp4", "group", 4, group=group, ignored=patterns, demanded=parts)
    strategy = MODELOPT_STRATEGIES[algorithm]
    return Quantisation("modelopt", "scaled", strategy, 8, ignored=patterns, quantises_activations=True)


def _read_awq(described: dict[str, Any]) -> Quantisation:
    bits = int(described.get("bits") or described["w_bit"])
    if bits != 4:
        raise Unread(f"{bits} bits")
    version = str(described.get("version") or described.get("format") or "gemm").lower()
    if version != "gemm":
        raise Unread(version)
    group = described.get("group_size") or described.get("q_group_size")
    ignored = tuple(described.get("modules_to_not_convert") or ())
    return _grouped("awq", bits, group, ignored)


def _read_gptq(described: dict[str, Any]) -> Quantisation:
    bits = int(described["bits"])
    if bits not in (4, 8):
        raise Unread(f"{bits} bits")
    layout = described.get("checkpoint_format") or described.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or described.get("is_marlin_format"):
        raise Unread("marlin" if described.get("is_marlin_format") else str(layout))
    if described.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise Unread(f"packed into {described['pack_dtype']}")
    ignored = _excluded_by_rules(described)
    # The first version of the format stores every zero point minus one.
    how = _grouped("gptq", bits, described["group_size"], ignored, int(layout == "gptq"))
    return replace(how, demanded=frozenset({"g_idx"})) if described.get("desc_act") and how.group else how


def _excluded_by_rules(described: dict[str, Any]) -> tuple[str, ...]:
    """Return the modules that GPTQ's `dynamic` rules leave unquantised, as regular expressions.

    The first rule that matches the start of a module's name decides: `-:` excludes the module, any other rule gives it
    other fields.  Raises Unread for fields that differ from the checkpoint's."""
    excluded, quantised = list[str](), ""
    for rule, fields in (described.get("dynamic") or {}).items():
        pattern = rule.removeprefix("-:")
        if pattern != rule:
            excluded.append(f"re:{quantised}(?:{pattern})" if quantised else f"re:{pattern}")
            continue
        for name, value in fields.items():
            if name not in RULE_FIELDS or described.get(name) != value:
                raise Unread(f"the rule {rule} in dynamic: {name} {value}")
        quantised += f"(?!{rule.removeprefix('+:')})"
    return tuple(excluded)


def _grouped(
    method: Literal["awq", "gptq"], bits: int, group: Any, ignored: tuple[str, ...], zero_shift: int = 0
) -> Quantisation:
    whole = group is None or int(group) == -1
    return Quantisation(
        method,
        method,
        "channel" if whole else "group",
        bits,
        group=0 if whole else _positive(group),
        zero_shift=zero_shift,
        ignored=ignored,
    )


def _read_mxfp4(described: dict[str, Any]) -> Quantisation:
    ignored = tuple(described.get("modules_to_not_convert") or ())
    return Quantisation("mxfp4", "mxfp4", "group", 4, group=32, ignored=ignored)


def _positive(value: Any) -> int:
    if int(value) < 1:
        raise ValueError(f"{value} is no size")
    return int(value)


def _pair(value: Any) -> tuple[int, int]:
    rows, columns = value
    return _positive(rows), _positive(columns)


CONFIG_READERS: dict[str, Callable[[dict[str, Any]], Quantisation]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}
