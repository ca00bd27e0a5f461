"""LoRA adapters that clients choose by `model`, as gateways know them."""

from __future__ import annotations

import msgspec

from quire.engine.adapters.errors import AdapterError
from quire.engine.adapters.files import digest_of
from quire.engine.adapters.names import adapter_id, parse_option


class ServedAdapter(msgspec.Struct, frozen=True):
    """An adapter on the base model.  Fields are only ever appended: gateways of two releases read them in Redis."""

    name: str
    id: str  # as in Generate.adapter
    path: str  # its folder, for the engines
    looked_up: bool = False  # found by its name in --lora-dir, where it is looked up for each request


def read_adapters(option: str, taken: list[str]) -> dict[str, ServedAdapter]:
    """Return the adapters of `--lora` by name.  `taken`: names of the base model.

    Raises AdapterError for a name that is taken, and for files that cannot be served."""
    found = {}
    for name, path in parse_option(option).items():
        if name in taken:
            raise AdapterError(f"--lora {name}: the base model has this name")
        found[name] = ServedAdapter(name, adapter_id(name, digest_of(path)), str(path))
    return found
