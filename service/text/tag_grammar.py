"""Grammar rules for arguments written one by one between tags, from the schema of a tool's parameters.

    parameters --arguments_of--> one Argument per property: a string as text, any other value as JSON
    Arguments  --ToolRules-----> Lark; B0 ... are terminals of strings, @value0 ... are schemas of other values

A string is written without quotes.  So it must not contain a marker at which the parser would end it.  If the parser
infers types from the text, the string must not look like a number, true, false, null, a list or an object.  Parameters
for which no such rules exist are written as one JSON object, if the parser reads that.  Otherwise the request is
refused with the path of the schema.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from quire.service.grammar.grammar import ANY_TEXT, Parameters, StringRule
from quire.service.grammar.json_schema import ASSERTIONS, FORMATS, PATTERNS
from quire.service.grammar.schema_algebra import TYPES, Schemas
from quire.service.output.argument_types import types_of
from quire.service.text.call_form import TagForm
from quire.service.text.lark_text import LarkText

KEY = re.compile(r"[\w.-]+")  # argument names that are safe in every notation
DEPTH = 16  # maximum nesting of references and unions
# Keywords of a parameters schema that can be enforced with arguments in tags.
BESIDE = frozenset({"type", "properties", "required", "additionalProperties"})
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

EMPTY = '""'  # the empty text in a Lark rule

Schema = dict[str, Any]


class Argument(NamedTuple):
    """Grammar parts for one argument."""

    key: str
    path: str
    required: bool
    text: str | None  # terminal for its string values; None: the argument accepts no strings
    loose: str  # terminal for any string, used if llguidance rejects `text` and the tool is not strict
    values: Schema | None  # schema of its other values; None: the argument accepts only strings


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

    def terminal(self, schema: Schema, taken: list[str]) -> str | None:
        """Return the terminal for the strings of a schema; None if there is no such terminal.

        `taken`: types that the parser infers from texts that look like them; such texts are excluded."""
        conditions = self._conditions
        if taken:
            kinds = "|".join(TAKEN[kind] for kind in dict.fromkeys(taken))
            conditions = [*conditions, f"~/\\s*({kinds})\\s*/"]
        if "enum" in schema:
            if not all(self._is_said(text, taken) for text in schema["enum"]):
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


# ---------------------------------------------------------------------------------------------------------- arguments


def arguments_of(parameters: Schema, path: str, form: TagForm) -> list[Argument] | str:
    """Return the grammar parts of each argument, or the path of the schema's part that cannot be written one by one."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    for word in sorted(asserted(parameters) - BESIDE):
        return f"{path}.{word}"
    if not isinstance(properties, dict) or not isinstance(required, list):
        return f"{path}.properties"
    is_open = not properties and parameters.get("additionalProperties", True) is not False
    if is_open and form.body is not None:  # without `body`, only a call without arguments can be written
        return f"{path}.additionalProperties"
    if missing := [key for key in required if key not in properties]:
        return f"{path}.required: {str(missing[0])[:64]}"
    schemas, strings = Schemas(parameters), Strings(form)
    found = []
    for key, schema in properties.items():
        at = f"{path}.properties.{key[:64]}"
        one = _argument(key, schema, parameters, schemas, strings, form) if KEY.fullmatch(key) else None
        if one is None:
            return at
        text, loose, values = one
        if text is None and values is None:  # the schema allows no value
            if key in required:
                return at
            continue
        found.append(Argument(key, at, key in required, text, loose, values))
    return found


def _argument(
    key: str, schema: Any, parameters: Schema, schemas: Schemas, strings: Strings, form: TagForm
) -> tuple[str | None, str, Schema | None] | None:
    """Return `text`, `loose` and `values` of an Argument; None if it cannot be written in tags."""
    if form.quoted:
        return None, ANY_TEXT, {} if schema is True else schema
    found = split(schema, schemas)
    if found is None:
        return None
    wanted = types_of(schema, parameters)
    others = [] if form.named or not wanted else [kind for kind in wanted if kind in TAKEN]
    if not form.named:
        if found.strings and wanted and "string" not in wanted:
            return None
        if not wanted or wanted == ["string"]:
            if not found.strings and found.others:
                return None
            found = found._replace(others=[])
    loose = strings.terminal({}, others) or ANY_TEXT
    if not found.strings:
        return None, loose, _union(found.others)
    texts = [strings.terminal(one, others) for one in found.strings]
    if None in texts:
        return None
    if form.named or not found.others:
        return " | ".join(map(str, texts)), loose, _union(found.others)
    return _with_values([str(text) for text in texts], found.others, loose)


def _with_values(texts: list[str], others: list[Schema], loose: str) -> tuple[str, str, Schema | None] | None:
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
    return every, " | ".join([loose, *scalars]), _union(rest)


def _union(schemas: list[Schema]) -> Schema | None:
    if not schemas:
        return None
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


# -------------------------------------------------------------------------------------------------------------- rules


class Named(NamedTuple):
    """An argument with the names of its terminal and its schema."""

    key: str
    required: bool
    string: str  # number of the terminal for its strings; "": the argument accepts no strings
    value: str  # name of the schema of its other values; "": the argument accepts only strings


class Parts:
    """The terminals and schemas of all arguments of a request, without duplicates."""

    def __init__(self) -> None:
        self.values: list[Parameters] = []
        self.strings: list[StringRule] = []
        self._names: dict[tuple[str, str, bool], str] = {}

    def named(self, arguments: list[Argument], parameters: Schema, strict: bool) -> list[Named]:
        """Register terminals and schemas of a tool's arguments, and return the arguments with their names."""
        return [
            Named(one.key, one.required, self._string(one, strict), self._value(one, parameters, strict))
            for one in arguments
        ]

    def _string(self, one: Argument, strict: bool) -> str:
        if one.text is None:
            return ""
        key = one.text, one.loose, strict and one.text != one.loose
        if key not in self._names:
            self._names[key] = str(len(self.strings))
            self.strings.append(StringRule(f"B{self._names[key]}", one.path, one.text, one.loose, strict))
        return self._names[key]

    def _value(self, one: Argument, parameters: Schema, strict: bool) -> str:
        if one.values is None:
            return ""
        schema = _with_definitions(one.values, parameters)
        key = "value", json.dumps(schema), strict
        if key not in self._names:
            self._names[key] = f"value{len(self.values)}"
            kinds = [kind for kind in types_of(one.values, parameters) if kind in TYPES]
            loose = {"type": kinds} if kinds else {}
            self.values.append(Parameters(one.path, schema, strict, self._names[key], loose))
        return self._names[key]


class ToolRules:
    """Makes the rules for calls of each tool, in one notation (`TagForm`)."""

    def __init__(self, form: TagForm, quoted: LarkText) -> None:
        self._form, self._quoted = form, quoted
        texts = {
            "first": form.first,
            "between": form.between,
            "last": form.last,
            "text": form.text[0],
            "value": form.value[0],
            "valued": form.value[1],
        }
        self.common = [f"{name}: {quoted(text)}" for name, text in texts.items() if text]
        self._rule = {name: name if text else "" for name, text in texts.items()}
        self._strings = set[str]()

    def of(self, at: int, name: str, arguments: list[Named] | None) -> list[str]:
        """Return the rules of `call{at}`, a call of one tool.  `arguments` None: one JSON object, @tool{at}."""
        form, quoted, rule = self._form, self._quoted, self._rule
        begin = f"call{at}: {json.dumps(name)}"
        if arguments is None:
            before, after = form.body or ("", "")
            return [f"{begin} {quoted(before)} @tool{at} {quoted(after)}"]
        rules, ways = list[str](), list[str]()
        firsts = next((position + 1 for position, one in enumerate(arguments) if one.required), len(arguments))
        for position, one in enumerate(arguments):
            rest = f"r{at}_{position + 1}" if position + 1 < len(arguments) else ""
            if position < firsts:
                ways.append(f"a{at}_{position} {rest}")
            rules += self._argument(f"a{at}_{position}", one)
            if position:
                again = f"({rule['between']} a{at}_{position})" + ("" if one.required else "?")
                rules.append(f"r{at}_{position}: {again} {rest}")
        some = f"({' | '.join(ways)}) {rule['last']}"
        if form.empty is None or any(one.required for one in arguments):
            return [f"{begin} {rule['first']} {some}", *rules]
        none = form.empty + form.last
        if not arguments:
            return [f"{begin} {quoted(none)}"]
        # The lexer takes the longest match, so no alternative may be a prefix of another: factor out the common prefix.
        shared = quoted.shared(form.first, none)
        first, none = form.first[len(shared) :], none[len(shared) :]
        return [f"{begin} {quoted(shared)} ({quoted(first)} {some} | {quoted(none) or EMPTY})", *rules]

    def _argument(self, name: str, one: Named) -> list[str]:
        closing, rule, ways, rules = self._form.text[1], self._rule, list[str](), list[str]()
        if one.string:
            cut = self._quoted.first_special(closing)
            ways.append(f"{rule['text']} V{one.string} {self._quoted(closing[cut:])}")
            if one.string not in self._strings:
                self._strings.add(one.string)
                rules.append(f"V{one.string}: B{one.string} {json.dumps(closing[:cut]) if cut else ''}")
        if one.value:
            ways.append(f"{rule['value']} @{one.value} {rule['valued']}")
        return [f"{name}: {json.dumps(one.key)} ({' | '.join(ways)})", *rules]


def _with_definitions(schema: Schema, root: Schema) -> Schema:
    """Return a schema together with the definitions of `root` to which its references point."""
    needed, waiting = dict[str, dict[str, Any]](), [json.dumps(schema)]
    while waiting:
        for group, name in re.findall(r'"\$ref": "#/(\$defs|definitions)/([^"/]+)', waiting.pop()):
            name = json.loads(f'"{name}"').replace("~1", "/").replace("~0", "~")
            one = root.get(group, {}).get(name) if isinstance(root.get(group), dict) else None
            if one is not None and name not in needed.setdefault(group, {}):
                needed[group][name] = one
                waiting.append(json.dumps(one))
    return {**schema, **needed}
