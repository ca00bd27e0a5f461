"""`--hf-overrides`: fields of a checkpoint's config.json that the operator changes, merged before the model is built.

    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}

Objects are merged field by field.  Only fields that the model's config class or its config.json knows can be changed.
A change that the config class ignores is refused, too: after the merge each changed field is read back.  A change
without effect on the served model (served_config.py), such as a field of a vision tower, is also refused.
"""

from __future__ import annotations

import difflib
import inspect
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from quire.engine.executor.errors import ModelLoadError, UnsupportedModel
from quire.engine.executor.models import rope
from quire.engine.executor.models.config_errors import field_reason

OPTION = "--hf-overrides"
# Names in config.json of the parameters of rotary position embeddings: before transformers 5, and since.
ROPE = ("rope_scaling", "rope_parameters")
ROPE_FIELDS = {*RopeParameters.__annotations__, "type", "short_mscale", "long_mscale", "mrope_interleaved"}
ROPE_KEPT = {"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}  # kept if the kind changes
FIXED = {"model_type", "transformers_version"}  # select the config class, and do not describe the model
CONVERTED = {"dtype", "torch_dtype"}  # transformers reads them as another type than it writes


def parse(text: str) -> dict[str, Any]:
    """Return the object that the option's value describes; {} for "".  Raises ModelLoadError."""
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ModelLoadError(f"{OPTION}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelLoadError(f'{OPTION}: must be a JSON object, such as {{"max_position_embeddings": 8192}}')
    return found


def load_config(directory: Path, changes: dict[str, Any]) -> PretrainedConfig:
    """Return the config of a checkpoint with its changes.  Raises ModelLoadError."""
    config = _read(directory, f"{directory}/config.json")
    if not changes:
        return config
    with tempfile.TemporaryDirectory(prefix="quire-config-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(merged(directory, config, changes)), encoding="utf-8")
        changed = _read(Path(folder), OPTION)
    _check_honoured(changed, changes)
    return changed


def each_left_out(changes: dict[str, Any], config: PretrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path of each changed field, and the changes without it."""
    for name, value in changes.items():
        others = {other: each for other, each in changes.items() if other != name}
        if isinstance(getattr(config, name, None), PretrainedConfig):
            for field in value:
                yield f"{name}.{field}", others | {name: {other: value[other] for other in value if other != field}}
        else:
            yield name, others


def merged(directory: Path, config: PretrainedConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with `changes`; `config`: the config without them.  Raises ModelLoadError for an unknown
    field.

    A field of the language model of a multimodal model is `text_config.NAME`, as in the file."""
    return _merge(json.loads((directory / "config.json").read_bytes()), changes, config, "")


def _read(directory: Path, source: str) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # config classes raise any kind of error
        raise ModelLoadError(f"{source}: {field_reason(_described(directory), error)}") from error
    try:
        text = config.get_text_config()
    except ValueError as error:  # musicgen has an encoder and a decoder of text
        reason = "its config has several text models; only decoder-only language models are served"
        raise UnsupportedModel(f"{config.model_type}: {reason}") from error
    if not isinstance(text, PretrainedConfig):
        raise ModelLoadError(f"{source}: {config.model_type} has no text_config, and the file holds {text!r} there")
    positions = vars(text).get("max_position_embeddings")  # xlnet's class has -1 there
    if positions is not None and positions < 1:
        raise ModelLoadError(f"{source}: max_position_embeddings is {positions}; it must be at least 1")
    rope.check(text, source)
    return config


def _described(directory: Path) -> dict[str, Any]:
    """Return the object in config.json; an empty one if the file holds none."""
    try:
        described = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        described = {}
    return described if isinstance(described, dict) else {}


def _merge(described: dict[str, Any], changes: dict[str, Any], config: PretrainedConfig, path: str) -> dict[str, Any]:
    """Return the fields of one config object, changed.  `path`: its prefix in the file, "" or "text_config."."""
    known = _fields(config) | described.keys()
    found = dict(described)
    for name, value in changes.items():
        inner = getattr(config, name, None)
        if name not in known or name in FIXED:
            raise _unknown(config.model_type, path + name, known, config)
        if name in ROPE:
            at = next((each for each in ROPE if described.get(each)), name)
            found[at] = _merge_rope(found.get(at) or {}, value, config, f"{path}{name}")
        elif name == "rope_theta" and (angles := found.get("rope_parameters")) and "rope_theta" in angles:
            found["rope_parameters"] = angles | {name: value}  # the file has rope_theta there
        elif isinstance(inner, PretrainedConfig):
            if not isinstance(value, dict):
                raise ModelLoadError(f"{OPTION}: {path}{name} must be an object")
            found[name] = _merge(described.get(name) or {}, value, inner, f"{path}{name}.")
        else:
            found[name] = _merge_plain(described.get(name), value, config.model_type, path + name)
    return found


def _merge_plain(before: Any, value: Any, kind: str, path: str) -> Any:
    """Return a changed field that is no config object.  An object is merged into the old object, and may use only its
    names."""
    if not (isinstance(before, dict) and before and isinstance(value, dict)):
        return value
    for name in value:
        if name not in before:
            raise _unknown(kind, f"{path}.{name}", before)
    return before | {name: _merge_plain(before[name], each, kind, f"{path}.{name}") for name, each in value.items()}


def _merge_rope(before: dict[str, Any], value: Any, config: PretrainedConfig, path: str) -> dict[str, Any]:
    """Return changed parameters of rotary embeddings, for each kind of layer if the file has several."""
    if value is None:
        value = {"rope_type": "default"}
    if not isinstance(value, dict):
        raise ModelLoadError(f"{OPTION}: {path} must be an object or null")
    if kinds := [name for name, each in before.items() if isinstance(each, dict)]:
        for name in value:
            if name not in kinds:
                raise _unknown(config.model_type, f"{path}.{name}", kinds)
        return before | {
            name: _merge_rope(before[name], each, config, f"{path}.{name}") for name, each in value.items()
        }
    labels = set(getattr(config, "layer_types", None) or [])
    for name in value:
        if name not in ROPE_FIELDS | before.keys() | labels:
            raise _unknown(config.model_type, f"{path}.{name}", ROPE_FIELDS)
    if value.keys() & labels:
        return dict(value)
    old, new = _with_type(before), _with_type(value)
    if (kind := new.get("rope_type")) is not None and kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise ModelLoadError(f"{OPTION}: {path}.rope_type {kind!r} is none of {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    if kind is not None and kind != old.get("rope_type", "default"):
        old = {name: each for name, each in old.items() if name in ROPE_KEPT}
    return old | new


def _with_type(angles: dict[str, Any]) -> dict[str, Any]:
    """Return parameters with their kind under transformers 5's name, `rope_type`."""
    return {("rope_type" if name == "type" else name): value for name, value in angles.items()}


def _fields(config: PretrainedConfig) -> set[str]:
    """Return the names that config.json may have for this class."""
    signature = inspect.signature(type(config)).parameters
    names = {*config.to_dict(), *config.attribute_map, *signature} - {"kwargs", "args", "self"}
    return names | {*ROPE, "rope_theta"} if "rope_parameters" in names else names


def _unknown(kind: str, path: str, known: Any, config: PretrainedConfig | None = None) -> ModelLoadError:
    name = path.rpartition(".")[2]
    if name in FIXED:
        return ModelLoadError(f"{OPTION}: {path} cannot be changed")
    text = None if config is None else config.get_text_config()
    if text is not None and text is not config and name in _fields(text):
        return ModelLoadError(f"{OPTION}: {kind} has no {path}; its text part has: text_config.{name}")
    near = difflib.get_close_matches(name, known, n=1)
    return ModelLoadError(f"{OPTION}: {kind} has no {path}" + (f"; did you mean {near[0]}?" if near else ""))


def _check_honoured(config: PretrainedConfig, changes: dict[str, Any], path: str = "") -> None:
    """Raise ModelLoadError for a changed field whose value differs in the config object."""
    text = config.get_text_config()  # some files have the fields of a multimodal model's text part at the top
    for name, value in changes.items():
        inner = getattr(config if hasattr(config, name) else text, name, None)
        if name in CONVERTED:
            continue
        if name in ROPE or (name == "rope_theta" and "rope_theta" not in vars(config)):
            angles = getattr(config, "rope_parameters", None) or getattr(text, "rope_parameters", None) or {}
            wanted = {name: value} if name == "rope_theta" else _with_type(value or {})
            for place, field, asked in _leaves(wanted, angles, f"{path}{name}"):
                if asked != field:
                    raise ModelLoadError(f"{OPTION}: {place} stays {field!r}: another field overrides it")
        elif isinstance(inner, PretrainedConfig):
            _check_honoured(inner, value, f"{path}{name}.")
        elif isinstance(value, bool | int | float | str) and inner != value:
            raise ModelLoadError(f"{OPTION}: {path}{name} stays {inner!r}: another field overrides it")


def _leaves(wanted: dict[str, Any], found: dict[str, Any], path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each parameter's path, the value that was read, and the requested value."""
    for name, asked in wanted.items():
        field = found.get(name)
        if isinstance(asked, dict) and isinstance(field, dict):
            yield from _leaves(_with_type(asked), field, f"{path}.{name}")
        else:
            yield f"{path}.{name}", field, asked
