"""Sampling defaults from the model's `generation_config.json`, applied as vLLM does.

A field of a request takes precedence over the file, and the file over OpenAI's default.  `do_sample` is ignored: a
request without `temperature` is sampled.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from quire.engine.wire.messages import Sampling
from quire.service.common.limits import broken
from quire.service.config import GatewayConfig
from quire.service.text.vocabulary import ModelError

NAME = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read(config: GatewayConfig) -> Sampling:
    """Return the sampling defaults: the model's, or OpenAI's with --generation-config none.

    Raises ModelError for a value out of limits."""
    if config.generation_config == "none":
        return Sampling()
    return parse(_text(config.model), config)


def _text(model: str) -> str:
    """Return the text of a model's `generation_config.json`; "{}" if it has none.  May use the network.

    Raises ModelError if the file is not UTF-8."""
    # Imported here, since it takes over a second and not every process that imports this module needs it.
    from transformers.utils import cached_file

    try:
        path = cached_file(model, NAME)
    except OSError:  # the model has no such file
        return "{}"
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise _unusable(f"is not UTF-8: {error.reason} at byte {error.start:,}") from None


def parse(text: str, config: GatewayConfig) -> Sampling:
    """Return OpenAI's defaults, changed by a `generation_config.json`; null means absent.  Raises ModelError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise _unusable(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _unusable("holds no object")
    changes: dict[str, Any] = {}
    for name in FIELDS:
        value = found.get(name)
        if value is None:
            continue
        number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
        if name == "top_k" and value == -1:
            value = 0
        if not number or broken(name, value, config) is not None:
            raise _unusable(f"has {name} {value!r}")
        changes[name] = value if name == "top_k" else float(value)
    return msgspec.structs.replace(Sampling(), **changes)


def _unusable(why: str) -> ModelError:
    return ModelError(f"{NAME} of the model {why}; correct it, or start with --generation-config none")


def describe(sampling: Sampling) -> str:
    """Return text for a log line with the defaults that differ from OpenAI's; "" if none differs."""
    usual = Sampling()
    found = {name: getattr(sampling, name) for name in FIELDS}
    return ", ".join(f"{name} {value:g}" for name, value in found.items() if value != getattr(usual, name))
