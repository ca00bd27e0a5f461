"""Known chat templates: which response template belongs to each, from `response_templates.json`."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

DATA = Path(__file__).with_name("response_templates.json")


class _Known(msgspec.Struct, forbid_unknown_fields=True):
    """Which response template belongs to a chat template."""

    response_template: str
    sha256: str = ""  # digest of the chat template, as `digest` computes it
    contains: list[str] = []  # all of these, for a chat template without a digest here
    lacks: list[str] = []  # none of these


class _Data(msgspec.Struct, forbid_unknown_fields=True):
    """Content of `response_templates.json`."""

    chat_templates: list[_Known]  # digests are looked up first; then the first entry whose strings fit counts
    response_templates: dict[str, dict[str, Any]]


@cache
def known() -> _Data:
    """Return the content of the data file."""
    return msgspec.json.decode(DATA.read_bytes(), type=_Data)


def digest(chat_template: str) -> str:
    """Return the SHA-256 of a chat template, without spaces at the end of its lines and empty lines around it."""
    lines = [line.rstrip() for line in chat_template.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def name_of(chat_template: str) -> str | None:
    """Return the name of the response template that belongs to a chat template; None for an unknown one."""
    wanted = digest(chat_template)
    for entry in known().chat_templates:
        if entry.sha256 == wanted:
            return entry.response_template
    for entry in known().chat_templates:
        if not entry.contains or any(text in chat_template for text in entry.lacks):
            continue
        if all(text in chat_template for text in entry.contains):
            return entry.response_template
    return None
