"""Conversion of arguments that a model writes as plain text to JSON values, by the schemas of the request's tools.

    tools --reduced--> names and types, stored with the request --Tools--> text of an argument -> its JSON

A text stays a string unless the argument's schema has another type and the text is a value of that type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from quire.service.output.json_repair import WHOLE_CHARS, Repair, repaired, valid

OUTLINES = 128  # maximum number of subschemas kept per argument, for readers of nested tags
SCHEMAS = 64  # maximum number of schemas visited for one argument, through references and unions
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
NO_STRING = ["integer", "number", "boolean", "null", "object", "array"]  # types of an argument that is no string
_NAMESPACES = re.compile(r"[.:/]")
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def reduced(tools: list[dict[str, Any]], *, nested: bool = False) -> list[dict[str, Any]]:
    """Reduce tools to the names and types of their arguments.  `nested`: keep the types within arguments, too."""
    found = []
    for tool in tools:
        parameters = tool["function"].get("parameters") or {}
        properties = parameters.get("properties")
        types = {
            name: _outline(schema, parameters, [OUTLINES]) if nested else {"type": types_of(schema, parameters)}
            for name, schema in (properties.items() if isinstance(properties, dict) else ())
        }
        found.append({"function": {"name": tool["function"]["name"], "parameters": {"properties": types}}})
    return found


def _outline(schema: Any, root: dict[str, Any], left: list[int]) -> dict[str, Any]:
    """Return the types of a schema and of its subschemas, of at most `left[0]` schemas in total."""
    left[0] -= 1
    found: dict[str, Any] = {"type": types_of(schema, root)}
    for one in _branches(schema, root):
        if isinstance(properties := one.get("properties"), dict) and "properties" not in found:
            found["properties"] = {}
            for name, inner in properties.items():
                if left[0] > 0:
                    found["properties"][name] = _outline(inner, root, left)
        if isinstance(one.get("items"), dict) and "items" not in found and left[0] > 0:
            found["items"] = _outline(one["items"], root, left)
    return found


def _branches(schema: Any, root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema, and those that its references and unions name, at most `SCHEMAS`."""
    waiting = [schema]
    for _ in range(SCHEMAS):
        one = waiting.pop(0) if waiting else None
        if isinstance(one, dict):
            yield one
            if isinstance(one.get("$ref"), str):
                waiting.append(_referenced(one["$ref"], root))
            for union in ("anyOf", "oneOf", "allOf"):
                waiting += _list(one.get(union))


def types_of(schema: Any, root: dict[str, Any]) -> list[str]:
    """Return the types that a schema allows, in the order of the schema.  References are resolved in `root`."""
    found: list[str] = []
    waiting, seen = [schema], 0
    while waiting and seen < SCHEMAS:
        one, seen = waiting.pop(0), seen + 1
        if not isinstance(one, dict):
            continue
        if isinstance(one.get("$ref"), str):
            waiting.append(_referenced(one["$ref"], root))
        declared = one.get("type")
        found += [declared] if isinstance(declared, str) else _strings(declared)
        if declared is None:
            values = _list(one.get("enum")) + ([one["const"]] if "const" in one else [])
            found += ["null" if value is None else JSON_TYPES.get(type(value), "string") for value in values]
            if "properties" in one:
                found.append("object")
            elif "items" in one:
                found.append("array")
        if one.get("nullable"):
            found.append("null")
        for union in ("anyOf", "oneOf", "allOf"):
            waiting += _list(one.get(union))
    return list(dict.fromkeys(found))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _strings(value: Any) -> list[str]:
    return [one for one in _list(value) if isinstance(one, str)]


def _referenced(path: str, root: dict[str, Any]) -> Any:
    """Resolve a reference such as "#/$defs/x" in the tool's parameters; None if it points to nothing."""
    if not path.startswith("#"):
        return None
    found: Any = root
    for part in path[1:].split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


class Tools:
    """The functions of one request, and the types of their arguments."""

    __slots__ = ("_outlines", "_types")

    def __init__(self, tools: Iterable[dict[str, Any]]) -> None:
        self._types: dict[str, dict[str, list[str]]] = {}
        self._outlines: dict[str, dict[str, Any]] = {}
        for tool in tools:
            function = tool["function"]
            properties = (function.get("parameters") or {}).get("properties") or {}
            self._outlines[function["name"]] = properties
            self._types[function["name"]] = {name: types_of(schema, {}) for name, schema in properties.items()}

    def __bool__(self) -> bool:
        return bool(self._types)

    def __contains__(self, name: str) -> bool:
        return name in self._types

    @property
    def initials(self) -> frozenset[str]:
        """First characters of the names."""
        return frozenset(name[:1] for name in self._types)

    def own_name(self, name: str) -> str:
        """Return the tool's name without a namespace that the model added, as in `functions.weather`."""
        last = _NAMESPACES.split(name)[-1]
        return last if name not in self._types and last in self._types else name

    def takes(self, name: str, argument: str) -> bool:
        """Return whether a function has an argument of this name."""
        return argument in self._types.get(name, {})

    def outlines(self, name: str) -> dict[str, Any]:
        """Return the reduced schemas of a function's arguments, by their names."""
        return self._outlines.get(name, {})

    def is_text(self, name: str, argument: str) -> bool:
        """Return whether an argument's text is always a string: no other type is declared."""
        types = self._types.get(name, {}).get(argument, [])
        return not types or types == ["string"]

    def types(self, name: str, argument: str) -> list[str]:
        """Return the types of an argument; []: not known, so it is read as a string."""
        return self._types.get(name, {}).get(argument, [])


class ArgumentText:
    """Text of one argument, as it arrives.  If it may be an object or a list, it is repaired incrementally."""

    __slots__ = ("_parts", "_repair", "_types", "chars")

    def __init__(self, types: list[str]) -> None:
        self._types, self.chars = types, 0
        self._parts: list[str] = []
        self._repair = Repair() if _repairs(types) and not {"object", "array"}.isdisjoint(types) else None

    def push(self, text: str) -> None:
        """Add text."""
        self._parts.append(text)
        self.chars += len(text)
        if self._repair is not None:
            self._repair.push(text)

    @property
    def begin(self) -> str:
        """The first characters, without leading white space."""
        return "".join(self._parts[:2]).lstrip()

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts)

    def value(self) -> str:
        """Return the complete text converted to JSON."""
        text = self.text
        if (data := _CDATA.fullmatch(text)) is not None:
            return typed(data[1], self._types)
        return typed(text, self._types, self._repair)


def typed(text: str, types: list[str], repair: Repair | None = None) -> str:
    """Convert a text to JSON: as a value of the first of `types` that fits, else as a string.

    Exact JSON of a type takes precedence over looser spellings: if `types` has boolean and integer, "1" is an integer.
    `repair`: a Repair that has already read the text."""
    bare = text.strip()
    for kind in types:
        if (found := _exact(bare, kind)) is not None:
            return found
    for kind in types:
        if kind in ("object", "array"):
            found = _container(bare, "{" if kind == "object" else "[", types, repair)
        else:
            found = _scalar(bare, kind)
        if found is not None:
            return found
    return json.dumps(text, ensure_ascii=False)


def _repairs(types: list[str]) -> bool:
    return "string" not in types  # if strings are allowed, invalid JSON is a string


def _exact(text: str, kind: str) -> str | None:
    """Return the JSON of a scalar if the text is exact JSON of this type, else None.

    Numbers are normalised, except those beyond a float's range."""
    if kind in ("boolean", "null"):
        return text if text in {"boolean": ("true", "false"), "null": ("null",)}[kind] else None
    if kind not in ("integer", "number") or not _NUMBER.fullmatch(text):
        return None
    return _scalar(text, kind) or (text if abs(float(text)) == float("inf") else None)


def _scalar(text: str, kind: str) -> str | None:
    """Return the JSON of a text as a scalar of one type, looser spellings allowed; None if it is no such value."""
    if kind == "boolean":
        low = text.lower()
        return "true" if low in ("true", "1") else "false" if low in ("false", "0") else None
    if kind == "null":
        return "null" if text in ("null", "None") else None
    if kind in ("integer", "number"):
        try:
            number = int(text) if text.lstrip("+-").isdecimal() and len(text) < 400 else float(text)
        except ValueError:
            return None
        if isinstance(number, float):
            if number != number or abs(number) == float("inf"):
                return None
            if kind == "integer":
                return str(int(number)) if number.is_integer() else None
            return json.dumps(int(number) if number.is_integer() and "." not in text else number)
        return json.dumps(number)
    return None


def _container(text: str, begins: str, types: list[str], repair: Repair | None) -> str | None:
    """Return the JSON of a text as an object or a list; None if it is neither."""
    if not text.startswith(begins):
        return None
    if not _repairs(types):
        return valid(text)
    if repair is not None and len(text) > WHOLE_CHARS:
        return repair.finish()
    return valid(text) or repaired(text)
