"""Reader of calls whose arguments are tags, with nested tags for objects and lists.

    <city>Paris</city><near><item>3</item></near> --tags--> a tree --types of the tool's schema--> JSON

The pattern `tag` of a notation distinguishes tags from text; MiniMax M3, for example, writes a marker before each tag.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.service.output.argument_types import typed
from quire.service.output.calls import CallPart
from quire.service.output.complete_calls import CompleteCalls
from quire.service.output.json_repair import valid

DEEPEST = 64  # maximum nesting of tags; a call with deeper nesting becomes content
ITEM = "item"  # tag of an element of a list

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
Outline = dict[str, Any]  # "type", "properties" and "items" of a schema, if known


class _Node:
    """An open tag."""

    __slots__ = ("children", "key", "outline", "texts")

    def __init__(self, key: str, outline: Outline) -> None:
        self.key, self.outline = key, outline
        self.texts: list[str] = []
        self.children: list[tuple[str, str]] = []  # (key, JSON) of complete tags within this one

    def inner(self, key: str) -> Outline:
        """Return the schema outline for a tag within this one; {} if it is unknown."""
        properties = self.outline.get("properties", {})
        found = properties.get(key) or (self.outline.get("items") if key == ITEM else None)
        return found or {}

    def json(self) -> str | None:
        """Return the JSON of the complete tag; None if it contains both tags and other text."""
        text, types = "".join(self.texts), self.outline.get("type", [])
        if not self.children:
            return _leaf(text, types)
        if text.strip():
            return None
        items = all(key == ITEM for key, _ in self.children)
        if items and ("array" in types or ("object" not in types and ITEM not in self.outline.get("properties", {}))):
            return f"[{', '.join(value for _, value in self.children)}]"
        return _object(self.children)


class NestedCalls(CompleteCalls):
    """Reads one call."""

    def _calls(self, text: str) -> list[CallPart] | None:
        name, notation = self._context.name, self._context.notation
        stack, at = [_Node("", {"properties": self._context.tools.outlines(name)})], 0
        for tag in notation.tag.finditer(text):
            if tag["bare"] is not None and tag["bare"] != stack[-1].key:
                continue  # text
            stack[-1].texts.append(text[at : tag.start()])
            at = tag.end()
            if tag["bare"] is None and not tag["closes"]:
                if len(stack) > DEEPEST:
                    return None
                stack.append(_Node(tag["key"], stack[-1].inner(tag["key"])))
                continue
            closed = stack.pop()
            value = closed.json()
            if not stack or closed.key != (tag["bare"] or tag["key"]) or value is None:
                return None
            stack[-1].children.append((closed.key, value))
        if len(stack) != 1 or "".join([*stack[0].texts, text[at:]]).strip():
            return None
        return [(name, _object(stack[0].children))]


def _object(members: list[tuple[str, str]]) -> str:
    return f"{{{', '.join(f'{json.dumps(key, ensure_ascii=False)}: {value}' for key, value in members)}}}"


def _leaf(text: str, types: list[str]) -> str:
    """Convert a tag's text to JSON by `types`; without types, as JSON if it is valid, else as a string."""
    if types:
        blank = next((kind for kind in types if kind in ("array", "object")), "") if not text.strip() else ""
        if blank and "string" not in types:
            return "[]" if blank == "array" else "{}"
        return typed(text, types)
    bare = text.strip()
    return bare if _SCALAR.fullmatch(bare) else valid(bare) or json.dumps(text, ensure_ascii=False)
