"""LoRA adapters that clients choose by `model`."""

from __future__ import annotations

import msgspec

from quire.engine.adapters.errors import AdapterError
from quire.engine.adapters.files import digest_of
from quire.engine.adapters.names import adapter_id, parse_option


class ServedAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter.  Fields may only be appended, since gateways of different releases share them in Redis."""

    name: str
    id: str  # value of Generate.adapter
    path: str  # folder from which engines load it
    looked_up: bool = False  # found by its name in --lora-dir, so each request looks it up again


def read_adapters(option: str, taken: list[str]) -> dict[str, ServedAdapter]:
    """Return the adapters of `--lora` by name.  `taken`: names of the base model.

    Raises AdapterError for a name that is taken, and for unsupported files."""
    found = {}
    for name, path in parse_option(option).items():
        if name in taken:
            raise AdapterError(f"--lora {name}: the base model has this name")
        found[name] = ServedAdapter(name, adapter_id(name, digest_of(path)), str(path))
    return found
