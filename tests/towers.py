"""Tiny multimodal checkpoints, and copies of them whose tensors have the names of other versions of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.loadtest.studies.model_families import model_class
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint
from tests.quantised import KINDS, quantise_checkpoint

OTHERS = "visual|vision_tower|vision_model|multi_modal_projector"  # first parts of the names of other towers
# The beginnings of names in each order of parts: of the text model, of the head, of other towers.
ORDERS = {
    "flat": ("model.", "lm_head.", ""),
    "old": ("language_model.model.", "language_model.lm_head.", ""),
    "new": ("model.language_model.", "lm_head.", "model."),
}
LANGUAGE = r"(model\.language_model|language_model\.model|language_model|model)\."


def make(directory: Path, family: str, **fields: Any) -> Path:
    """Write the tiny checkpoint of a family, the complete model, into a folder of `directory`."""
    return make_checkpoint(directory / family, family, model_class=model_class(family), **fields)


def make_quantised(
    directory: Path, family: str, kind: str, *, keep: tuple[str, ...] = ("lm_head",), **fields: Any
) -> tuple[Path, dict[str, Tensor]]:
    """Write a checkpoint whose text part is quantised; return it, and its tensors as they should be read.

    keep: parts of names of modules of the text that are not.  The plain copy lies in the folder `plain`."""
    plain = make(directory / "plain", family, **fields)
    exact = quantise_checkpoint(plain, directory / kind, kind, keep=(*keep, *OTHERS.split("|")))
    return directory / kind, exact


def is_of_text(name: str) -> bool:
    return not re.match(rf"(model\.)?({OTHERS})\b", name)


def in_text(name: str) -> str:
    """What a causal language model calls a tensor of the text part."""
    return in_order(name, "flat")


def in_order(name: str, order: str) -> str:
    """What a tensor or module is called in another order of parts."""
    text, head, other = ORDERS[order]
    if not is_of_text(name):
        return other + name.removeprefix("model.")
    if found := re.fullmatch(r"(?:language_model\.)?lm_head\.(.*)", name):
        return head + found[1]
    return text + re.sub(f"^{LANGUAGE}", "", name)


def reorder(directory: Path, order: str) -> Path:
    """Give the tensors of a checkpoint the names of another order."""
    file = directory / "model.safetensors"
    save_file({in_order(name, order): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return directory


def describe(directory: Path, kind: str, **fields: Any) -> Path:
    """Write what the config of a kind says of its quantisation, with these fields."""
    config = directory / "config.json"
    described = json.loads(config.read_bytes()) | {"quantization_config": KINDS[kind].config | fields}
    config.write_text(json.dumps(described))
    return directory
