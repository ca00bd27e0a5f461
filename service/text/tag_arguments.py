"""The arguments of a tool, one by one, as a notation with tags writes them.

    parameters --arguments_of--> one Argument per property: a string as text, any other value as JSON

If the notation nests tags, objects and lists are tags within the tag of their argument (`Container`).  Parameters for
which no such rules exist are written as one JSON object, if the parser reads that.  Otherwise the request is refused
with the path of the schema.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from quire.service.grammar.grammar import ANY_TEXT
from quire.service.grammar.schema_algebra import Schemas
from quire.service.output.argument_types import OUTLINES, types_of
from quire.service.output.nested_calls import DEEPEST, ITEM
from quire.service.text.argument_values import TAKEN, Schema, Split, Strings, asserted, split, union, with_values
from quire.service.text.call_form import TagForm

KEY = re.compile(r"[\w.-]+")  # argument names that are safe in every notation
# Keywords of an object and of a list that can be enforced with tags, and of numbers, which are JSON.
BESIDE = frozenset({"type", "properties", "required", "additionalProperties"})
OF_LISTS = frozenset({"items", "minItems", "maxItems"})
OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
REPEATS = 64  # maximum of a list's bounds, since a grammar repeats the rule of an element


class Container(NamedTuple):
    """Grammar parts of an object or of a list whose members are tags; `json` instead if no schema describes them."""

    members: list[Argument]  # object: its members; list: its element
    least: int | None = None  # minimum number of elements; None: an object
    most: int | None = None
    empty: str | None = None  # text without members; None: there is at least one
    json: Schema | None = None


class Argument(NamedTuple):
    """Grammar parts for one argument."""

    key: str
    path: str
    required: bool
    text: str | None  # terminal for its string values; None: the argument accepts no strings
    loose: str  # terminal for any string, used if llguidance rejects `text` and the tool is not strict
    values: Schema | None  # schema of its other values; None: the argument accepts only strings
    inner: tuple[Container, ...] = ()  # its values that are written as nested tags


def arguments_of(parameters: Schema, path: str, form: TagForm) -> list[Argument] | str:
    """Return the grammar parts of each argument, or the path of the schema's part that cannot be written one by one."""
    return _Reader(parameters, form).arguments(parameters, path)


class _Reader:
    """Reads the schemas of one tool's arguments, for one notation."""

    def __init__(self, root: Schema, form: TagForm) -> None:
        self._root, self._form = root, form
        self._schemas, self._strings = Schemas(root), Strings(form)
        self._left = OUTLINES  # schemas of one argument of which the parser knows the types

    def arguments(self, parameters: Schema, path: str, depth: int = 0) -> list[Argument] | str:
        """Return the arguments that an object schema describes, or the path of what the notation cannot express."""
        properties, required = parameters.get("properties", {}), parameters.get("required", [])
        for word in sorted(asserted(parameters) - BESIDE):
            return f"{path}.{word}"
        if not isinstance(properties, dict) or not isinstance(required, list):
            return f"{path}.properties"
        is_open = not properties and parameters.get("additionalProperties", True) is not False
        if is_open and self._form.body is not None:  # without `body`, only a call without arguments can be written
            return f"{path}.additionalProperties"
        if missing := [key for key in required if key not in properties]:
            return f"{path}.required: {str(missing[0])[:64]}"
        found = []
        for key, schema in properties.items():
            at = f"{path}.properties.{key[:64]}"
            self._left = self._left if depth else OUTLINES
            one = self._argument(key, schema, at, depth) if KEY.fullmatch(key) else at
            if isinstance(one, str):
                return one
            if one.text is None and one.values is None and not one.inner:  # the schema allows no value
                if key in required:
                    return at
                continue
            found.append(one._replace(required=key in required))
        return found

    def _argument(self, key: str, schema: Any, path: str, depth: int) -> Argument | str:
        """Return the argument of a schema; its path if it cannot be written in tags."""
        form, self._left = self._form, self._left - 1
        if form.quoted:
            return Argument(key, path, False, None, ANY_TEXT, {} if schema is True else schema)
        found = split(schema, self._schemas)
        if found is None or self._left < 0 or depth == DEEPEST - 1:
            return path
        wanted = types_of(schema, self._root)
        others = [] if form.named or not wanted else [kind for kind in wanted if kind in TAKEN]
        if not form.named:
            if found.strings and wanted and "string" not in wanted:
                return path
            if not wanted or wanted == ["string"]:
                if not found.strings and found.others:
                    return path
                found = found._replace(others=[])
        nested = self._nested(found, path, depth) if form.nested is not None else (found, ())
        if isinstance(nested, str):
            return nested
        found, inner = nested
        loose = self._strings.terminal({}, others, key) or ANY_TEXT
        if not found.strings:
            return Argument(key, path, False, None, loose, union(found.others), inner)
        texts = [self._strings.terminal(one, others, key) for one in found.strings]
        if None in texts:
            return path
        if form.named or not found.others:
            return Argument(key, path, False, " | ".join(map(str, texts)), loose, union(found.others), inner)
        whole = with_values([str(text) for text in texts], found.others, loose)
        return path if whole is None else Argument(key, path, False, *whole, inner)

    # ---------------------------------------------------------------------------------------------- tags within tags

    def _nested(self, found: Split, path: str, depth: int) -> tuple[Split, tuple[Container, ...]] | str:
        """Divide the values other than strings into scalars, which are JSON, and containers of tags."""
        scalars, inner = list[Schema](), list[Container]()
        for one in found.others:
            words = asserted(one) - {"type"}
            types = [one["type"]] if isinstance(one.get("type"), str) else one.get("type", [])
            held = [kind for kind in types if kind in ("object", "array")]
            listed = [*one.get("enum", []), *([one["const"]] if "const" in one else [])]
            if any(isinstance(value, dict | list) for value in listed) or not (types or listed):
                return path
            if listed or not held:
                scalars.append({**one, "type": [kind for kind in types if kind not in held]} if held else one)
                continue
            if unknown := sorted(words - BESIDE - OF_LISTS - OF_NUMBERS):
                return f"{path}.{unknown[0]}"
            if rest := [kind for kind in types if kind not in held]:
                scalars.append({"type": rest, **{word: one[word] for word in words & OF_NUMBERS}})
            for kind in held:
                made = self._object(one, path, depth) if kind == "object" else self._list(one, path, depth)
                if isinstance(made, str):
                    return made
                empty = made.empty or {"object": "{}", "array": "[]"}[kind]
                inner.append(made._replace(empty=empty) if made.empty is not None and found.strings else made)
        kinds = [container.least is None for container in inner]
        if len(set(kinds)) < len(kinds) or (
            len(kinds) > 1 and any(one.key == ITEM for one in inner[kinds.index(True)].members)
        ):
            return path  # the parser knows the types of one object and of one list
        return found._replace(others=scalars), tuple(inner)

    def _object(self, schema: Schema, path: str, depth: int) -> Container | str:
        properties, more = schema.get("properties"), schema.get("additionalProperties", True)
        if not properties and more is not False:
            if (more is not True and more != {}) or schema.get("required"):
                return f"{path}.additionalProperties"
            return Container([], json=self._free("object", {}))
        members = self.arguments({word: schema[word] for word in asserted(schema) & BESIDE}, path, depth + 1)
        if isinstance(members, str):
            return members
        return Container(members, empty=None if any(one.required for one in members) else "")

    def _list(self, schema: Schema, path: str, depth: int) -> Container | str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        for word, bound in (("minItems", least), ("maxItems", most)):
            if bound is not None and not (isinstance(bound, int) and 0 <= bound <= REPEATS):
                return f"{path}.{word}"
        items = schema.get("items", True)
        if items is True or items == {}:
            return Container(
                [], 0, json=self._free("array", {"minItems": least} | ({} if most is None else {"maxItems": most}))
            )
        element = self._argument(ITEM, items, f"{path}.items", depth + 1)
        if isinstance(element, str):
            return element
        none = element.text is None and element.values is None and not element.inner
        if (most is not None and least > most) or (none and least):
            return path
        return Container([] if none or most == 0 else [element], max(least, 1), most, None if least else "")

    def _free(self, kind: str, more: Schema) -> Schema:
        """Return the schema of any object or list as JSON in which no string has the beginning of a marker."""
        begin = self._form.barred[0]
        one, other = re.escape(begin[0]), re.escape(begin[1:2])
        text = f"^([^{one}]|{one}+[^{one}{other}])*{one}*$"
        value: Schema = {
            "anyOf": [
                {"type": ["number", "boolean", "null"]},
                {"type": "string", "pattern": text},
                {"type": "array", "items": {"$ref": "#/$defs/value"}},
                {
                    "type": "object",
                    "patternProperties": {text: {"$ref": "#/$defs/value"}},
                    "additionalProperties": False,
                },
            ]
        }
        inside = {"object": value["anyOf"][3], "array": value["anyOf"][2]}[kind]
        return {**inside, **more, "$defs": {"value": value}}
