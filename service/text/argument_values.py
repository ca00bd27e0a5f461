"""The values of one argument: schemas of strings and of other values, and terminals for strings without quotes.

A string is written without quotes.  So it must not contain a marker at which the parser would end it.  If the parser
infers types from the text, the string must not look like a number, true, false, null, a list or an object.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from quire.service.grammar.grammar import ANY_TEXT
from quire.service.grammar.json_schema import ASSERTIONS, FORMATS, PATTERNS
from quire.service.grammar.schema_algebra import TYPES, Schemas
from quire.service.text.call_form import TagForm

DEPTH = 16  # maximum nesting of references and unions
OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
OF_OTHERS = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "divisibleBy"),
        *("dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("unevaluatedProperties", "unevaluatedItems"),
    }
)
# Lark expressions for values of a type without further assertions.
SCALARS = {
    "null": '"null"',
    "boolean": '("true" | "false")',
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?/",
}
_DIGITS = r"[+\-]?[0-9_.eE+\-\p{Nd}]*\p{Nd}[0-9_.eE+\-\p{Nd}]*"
# Regexes of texts that the parser takes for a value of the type rather than for a string.
TAKEN = {
    "null": r"null|None",
    "boolean": r"(?i:true|false)|[01]",
    "integer": _DIGITS,
    "number": _DIGITS,
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9\-]{0,30}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,5}}"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_CHAR = r"([A-Za-z0-9._~:@!$&'()*+,;=\-]|%[0-9A-Fa-f]{2})"
# Regexes of common texts of a format; every match is valid, but not every valid text matches.
SAID = {
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "email": rf"[A-Za-z0-9_+\-]{{1,32}}(\.[A-Za-z0-9_+\-]{{1,32}}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.\-]{{0,15}}:(//{_HOST}(:[1-9][0-9]{{0,3}})?(/{_CHAR}*)*|{_CHAR}(/|{_CHAR})*)"
        rf"(\?(/|\?|{_CHAR})*)?(#(/|\?|{_CHAR})*)?"
    ),
}

Schema = dict[str, Any]


class Split(NamedTuple):
    """A schema divided into schemas that accept strings, and schemas that accept other values."""

    strings: list[Schema]
    others: list[Schema]


def asserted(schema: Schema) -> frozenset[str]:
    """Return the keywords of a schema that assert something."""
    return ASSERTIONS.intersection(schema)


def split(schema: Any, schemas: Schemas, depth: int = 0) -> Split | None:
    """Divide a schema into schemas for strings and schemas for other values; None if it cannot be divided."""
    if schema is False:
        return Split([], [])
    if schema is True:
        schema = {}
    if not isinstance(schema, dict) or depth > DEPTH:
        return None
    words = asserted(schema)
    if words == {"$ref"}:
        return split(schemas.target(schema["$ref"]), schemas, depth + 1)
    for union in ("anyOf", "oneOf", "allOf"):
        if words == {union} and isinstance(schema[union], list):
            return _of_union(union, schema[union], schemas, depth)
    named = schema.get("type", sorted(TYPES - {"integer"}))
    types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if "string" not in types:
        return Split([], [schema])
    others = [one for one in types if one != "string"]
    if words & {"enum", "const"}:
        listed = [schema["const"]] if "const" in schema else schema["enum"]
        if not words <= {"type", "enum", "const"} or len(words & {"enum", "const"}) > 1 or not isinstance(listed, list):
            return None
        strings = [one for one in listed if isinstance(one, str)]
        rest = [one for one in listed if not isinstance(one, str)]
        other = {"enum": rest} if "type" not in schema else {"type": others, "enum": rest}
        return Split([{"enum": strings}] if strings else [], [other] if rest and others else [])
    if not words <= OF_STRINGS | OF_OTHERS | {"type"}:
        return None
    strings_only = {word: schema[word] for word in words & OF_STRINGS}
    rest_only = {word: schema[word] for word in words & OF_OTHERS}
    return Split([strings_only], [{"type": others, **rest_only}] if others else [])


def _of_union(union: str, branches: list[Any], schemas: Schemas, depth: int) -> Split | None:
    if union == "allOf" and len(branches) != 1:
        return None
    strings, others = list[Schema](), list[Schema]()
    for branch in branches:
        found = split(branch, schemas, depth + 1)
        if found is None:
            return None
        strings += found.strings
        others += found.others
    if union == "oneOf":
        if len(strings) > 1:
            return None
        others = [{"oneOf": others}] if len(others) > 1 else others
    return Split(strings, others)


class Strings:
    """Makes the terminals of string values for one notation (`TagForm`)."""

    def __init__(self, form: TagForm) -> None:
        self._form = form
        barred = "|".join(_escaped(text) for text in form.barred)
        self._conditions = [f"~/(?s:.*)({barred})(?s:.*)/"]
        if not form.spaces:
            self._conditions.append(r"/(\S|\S(?s:.*)\S)?/")

    def terminal(self, schema: Schema, taken: list[str], key: str) -> str | None:
        """Return the terminal for the strings of a schema; None if there is no such terminal.

        `taken`: types that the parser infers from texts that look like them; such texts are excluded."""
        conditions = self._conditions
        closing = _closing(key) if self._form.nested is not None else ""
        if closing:
            conditions = [*conditions, f"~/{closing}/"]
        if taken:
            kinds = "|".join(TAKEN[kind] for kind in dict.fromkeys(taken))
            conditions = [*conditions, f"~/\\s*({kinds})\\s*/"]
        if "enum" in schema:
            if not all(self._is_said(text, taken) for text in schema["enum"]):
                return None
            if closing and any(re.fullmatch(closing, text) for text in schema["enum"]):
                return None
            return "(" + " | ".join(map(json.dumps, schema["enum"])) + ")"
        found = [] if schema else [ANY_TEXT]
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            if not all(isinstance(one, int | float) and one == int(one) >= 0 for one in (least, most or 0)):
                return None
            found.append(f"/(?s:.{{{int(least)},{most if most == '' else int(most)}}})/")
        for pattern in self._patterns(schema):
            if pattern is None:
                return None
            found.append(pattern)
        return "(" + " & ".join([*(found or [ANY_TEXT]), *conditions]) + ")"

    def _patterns(self, schema: Schema) -> list[str | None]:
        found: list[str | None] = []
        if "pattern" in schema:
            found.append(_unanchored(schema["pattern"]))
        name = schema.get("format")
        if name in PATTERNS:
            found.append(f"/({_slashed(PATTERNS[name][1:-1])})/")  # [1:-1] removes the anchors
        elif name in FORMATS:
            found.append(f"/{_slashed(SAID[name])}/" if name in SAID else None)
        return found

    def _is_said(self, text: str, taken: list[str]) -> bool:
        """Return whether the parser reads this string of an enum unchanged."""
        if any(barred in text for barred in self._form.barred) or (text != text.strip() and not self._form.spaces):
            return False
        return not any(re.fullmatch(_python(TAKEN[kind]), text.strip()) for kind in taken)


def _closing(key: str) -> str:
    """Return the regex of texts at whose end the parser of nested tags takes a tag without its marker for the end."""
    return rf"(?s:.*)<\/{re.escape(key)}>[\x00-\x20\x80-\U0010FFFF]*"


def _python(pattern: str) -> str:
    return pattern.replace(r"\p{Nd}", r"\d")


def _slashed(pattern: str) -> str:
    return re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern, flags=re.DOTALL)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _unanchored(pattern: Any) -> str | None:
    """Return the terminal of all texts in which a JSON Schema `pattern` is found.

    None if the pattern has anchors elsewhere than at its two ends."""
    if not isinstance(pattern, str) or not pattern:
        return None
    begins, body = pattern.startswith("^"), pattern.removeprefix("^")
    ends = body.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", body)
    body = body[:-1] if ends else body
    bare = re.sub(r"\\.|\[\^?(\\.|[^\]])*\]", "", body, flags=re.DOTALL)
    if "^" in bare or "$" in bare or r"\b" in body or (("|" in bare) and (begins or ends)) or "\n" in body:
        return None
    around = "(?s:.*)"
    return f"/{'' if begins else around}({_slashed(body)}){'' if ends else around}/"


def with_values(texts: list[str], others: list[Schema], loose: str) -> tuple[str, str, Schema | None] | None:
    """Return `text`, `loose` and `values` of an Argument that accepts strings and other values.

    Scalars become a part of the terminal, since the lexer would take them for the beginning of a string."""
    scalars, rest = list[str](), list[Schema]()
    for one in others:
        types = [one["type"]] if isinstance(one.get("type"), str) else one.get("type", [])
        words = asserted(one)
        if words == {"type"} and types:
            scalars += [SCALARS[kind] for kind in types if kind in SCALARS]
            rest += [{"type": kind} for kind in types if kind not in SCALARS]
        elif "enum" in words and words <= {"type", "enum"}:
            if any(isinstance(value, dict | list | float) for value in one["enum"]):
                return None
            scalars += [json.dumps(json.dumps(value)) for value in one["enum"]]
        elif types and set(types) <= {"object", "array"}:
            rest.append(one)
        else:
            return None
    every = " | ".join([*texts, *scalars])
    return every, " | ".join([loose, *scalars]), union(rest)


def union(schemas: list[Schema]) -> Schema | None:
    if not schemas:
        return None
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
