"""Maximum positions of a model's rotary embeddings, and angles that depend only on the position.

Two kinds of scaling change every angle of a sequence that exceeds a length: the model's own maximum (`dynamic`), or its
original maximum (`longrope`).  transformers decides by the longest sequence of a batch.  A request's tokens would then
depend on other requests, and cached keys would be wrong.  So every sequence gets the angles of a sequence of
`max_model_len` tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from quire.engine.executor.errors import ModelLoadError

log = logging.getLogger(__name__)

OVER_0 = ("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")


def check(text: PretrainedConfig, source: str) -> None:
    """Raise ModelLoadError for an invalid parameter of rotary embeddings.  source: the file or option, for the
    message."""
    for _, rope in all_parameters(text):
        for name in OVER_0:
            value = rope.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise ModelLoadError(f"{source}: {name} of rotary embeddings is {value!r}; it must be a number over 0")


def all_parameters(text: PretrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return each kind of layer ("" for all layers) with its parameters."""
    rope = getattr(text, "rope_parameters", None) or {}
    several = [(name, each) for name, each in rope.items() if isinstance(each, dict)]
    return several or [("", rope)]


def parameters(text: PretrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each kind of layer ("" for all layers) that has scaling, with its parameters."""
    for name, rope in all_parameters(text):
        if rope.get("rope_type", "default") != "default":
            yield name, rope


def reach(text: PretrainedConfig, made_for: int, before: PretrainedConfig | None = None) -> int:
    """Return the maximum number of positions that the RoPE scaling supports; `made_for` without scaling.

    made_for  positions that the config names
    before    the text config of the checkpoint without the operator's changes

    A linear factor in the checkpoint itself counts as part of `made_for`, because most checkpoints include it there."""
    old = dict(parameters(before)) if before is not None else {}
    reaches = []
    for name, rope in parameters(text):
        kind, factor = rope["rope_type"], float(rope.get("factor") or 1.0)
        original = rope.get("original_max_position_embeddings") or made_for
        if kind in ("yarn", "llama3", "longrope"):
            reaches.append(int(original * factor))
        elif kind == "dynamic":
            reaches.append(int(made_for * factor))
        elif kind == "linear" and before is not None:
            own = old.get(name, {})
            reaches.append(int(made_for * factor / (own.get("factor") or 1.0 if own.get("rope_type") == kind else 1.0)))
    return max(made_for, min(reaches, default=0))


def short_reach(text: PretrainedConfig, made_for: int) -> int:
    """Return the number of positions, from 0, whose angles transformers computes alike for sequences of any length."""
    for _, rope in parameters(text):
        if rope["rope_type"] == "longrope":
            made_for = min(made_for, rope.get("original_max_position_embeddings") or made_for)
    return made_for


def fix_angles(model: nn.Module, text: PretrainedConfig, made_for: int, max_model_len: int) -> bool:
    """Give every sequence the angles of a sequence of `max_model_len` tokens.  Return whether angles depend on
    max_model_len."""
    kinds = {rope["rope_type"] for _, rope in parameters(text)} & {"dynamic", "longrope"}
    if not kinds or max_model_len <= short_reach(text, made_for):
        return False
    for module in model.modules():
        if hasattr(module, "rope_type") and hasattr(module, "config"):
            _fix(module, max_model_len)
    log.warning(
        "max_model_len %d is over the %d tokens up to which this model's rope scaling (%s) changes nothing: every "
        "sequence is computed as transformers computes one of that length, shorter sequences too",
        *(max_model_len, short_reach(text, made_for), ", ".join(sorted(kinds))),
    )
    return True


def _fix(module: nn.Module, max_model_len: int) -> None:
    """Append the position max_model_len - 1 to the inputs of a rotary module, and drop its angles from the result."""
    run = module.forward

    def forward(x: Tensor, position_ids: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        last = torch.full_like(position_ids[..., :1], max_model_len - 1)
        cos, sin = run(x, torch.cat([position_ids, last], -1), *others, **named)
        return cos[..., :-1, :], sin[..., :-1, :]

    module.forward = forward  # hides the method of the class
