"""Lookup of the response template for a known chat template, in `response_templates.json`."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

DATA = Path(__file__).with_name("response_templates.json")


class _Known(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of the data file: which response template belongs to which chat templates."""

    response_template: str  # name of the response template
    sha256: str = ""  # digest of the chat template, as `digest` computes it
    contains: list[str] = []  # texts that the chat template must contain, if no digest matches
    lacks: list[str] = []  # texts that the chat template must not contain


class _Data(msgspec.Struct, forbid_unknown_fields=True):
    """Content of `response_templates.json`."""

    chat_templates: list[_Known]  # a matching digest counts first, then the first entry whose texts match
    call_notations: dict[str, dict[str, Any]]  # tool-call notations that several families share, by the name in `like`
    response_templates: dict[str, dict[str, Any]]


@cache
def known() -> _Data:
    """Return the data file, with the notations that several families share inserted into their templates."""
    data = msgspec.json.decode(DATA.read_bytes(), type=_Data)
    for template in data.response_templates.values():
        for field in template["fields"].values():
            parts = {key: field.pop(key) for key in ("mark", "rest") if key in field}
            if "also" in field:
                field["also"] = [_filled(one, data.call_notations, parts) for one in field["also"]]
    return data


def _filled(notation: dict[str, Any], shared: dict[str, dict[str, Any]], parts: dict[str, str]) -> dict[str, Any]:
    """Return a notation with the keys of the shared notation in `like`, and with texts instead of {mark} and {rest}."""
    own = {key: value for key, value in notation.items() if key != "like"}
    whole = {**shared[notation["like"]], **own} if "like" in notation else own
    opens = whole.get("open_pattern", "")
    for key, text in parts.items():
        opens = opens.replace(f"{{{key}}}", text)
    return whole | ({"open_pattern": opens} if opens else {})


def digest(chat_template: str) -> str:
    """Return the SHA-256 of a chat template, ignoring white space at line ends and empty lines around it."""
    lines = [line.rstrip() for line in chat_template.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def name_of(chat_template: str) -> str | None:
    """Return the name of the response template for a chat template; None if the chat template is unknown."""
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
