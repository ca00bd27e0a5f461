"""Finds the config field that made transformers fail: its exceptions often name only the value, or no cause."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.engine.executor.errors import one_line

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim")
ANGLES = {"rope_parameters", "rope_scaling", "rope_theta"}
# Fields of rotary embeddings whose values are not numbers: objects, null, or names of scaling kinds.
NO_NUMBER = {"rope_parameters", "rope_scaling", "rope_type", "type"}


def field_reason(described: dict[str, Any], error: Exception) -> str:
    """Return one line that names the config field and its value, if the error shows it; else the error's first line.

    described: the config as a dict, from the file or from its class."""
    fields = list(leaves(described))
    for path, value in fields:
        name = path.rsplit(".", 1)[-1]
        if name in SIZES and isinstance(value, int) and value < 1:
            return f"{path} is {value}; it must be at least 1"
    if isinstance(error, KeyError) and error.args:
        for path, value in fields:
            if type(value) is type(error.args[0]) and value == error.args[0]:
                return f"{path} is {value!r}, which transformers does not know"
    for path, value in fields:
        *_, name = parts = path.split(".")
        odd = value is None or isinstance(value, str)
        if odd and name not in NO_NUMBER and ANGLES.intersection(parts):
            return f"{path} is {value!r}; it must be a number"
    return one_line(error)


def leaves(described: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field of nested objects that is not an object itself."""
    if not isinstance(described, dict):
        yield path, described
        return
    for name, value in described.items():
        yield from leaves(value, f"{path}.{name}" if path else str(name))
