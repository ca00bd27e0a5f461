"""Grammar rules for arguments written one by one between tags.

    tag_arguments.py --one Argument per property--> Parts: names --Named--> ToolRules: Lark

B0 ... are terminals of strings, @value0 ... are schemas of other values.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from quire.service.grammar.grammar import Parameters, StringRule
from quire.service.grammar.schema_algebra import TYPES
from quire.service.output.argument_types import types_of
from quire.service.text.argument_values import Schema
from quire.service.text.call_form import AGAIN, TagForm
from quire.service.text.lark_text import LarkText
from quire.service.text.tag_arguments import Argument, Container

EMPTY = '""'  # the empty text in a Lark rule


class Named(NamedTuple):
    """An argument with the names of its terminal and its schema."""

    key: str
    required: bool
    string: str  # number of the terminal for its strings; "": the argument accepts no strings
    value: str  # name of the schema of its other values; "": the argument accepts only strings
    inner: tuple[NamedContainer, ...] = ()


class NamedContainer(NamedTuple):
    """A `Container` with the names of its members' terminals and schemas."""

    members: list[Named]
    least: int | None
    most: int | None
    empty: str | None
    value: str  # name of its schema; "": its members are tags


class Parts:
    """The terminals and schemas of all arguments of a request, without duplicates."""

    def __init__(self) -> None:
        self.values: list[Parameters] = []
        self.strings: list[StringRule] = []
        self._names: dict[tuple[str, str, bool], str] = {}

    def named(self, arguments: list[Argument], parameters: Schema, strict: bool) -> list[Named]:
        """Register terminals and schemas of a tool's arguments, and return the arguments with their names."""
        return [
            Named(
                one.key,
                one.required,
                self._string(one, strict),
                self._value(one, one.values, parameters, strict),
                tuple(self._container(one, container, parameters, strict) for container in one.inner),
            )
            for one in arguments
        ]

    def _container(self, one: Argument, container: Container, parameters: Schema, strict: bool) -> NamedContainer:
        value = self._value(one, container.json, parameters, strict)
        members = self.named(container.members, parameters, strict)
        return NamedContainer(members, container.least, container.most, container.empty, value)

    def _string(self, one: Argument, strict: bool) -> str:
        if one.text is None:
            return ""
        key = one.text, one.loose, strict and one.text != one.loose
        if key not in self._names:
            self._names[key] = str(len(self.strings))
            self.strings.append(StringRule(f"B{self._names[key]}", one.path, one.text, one.loose, strict))
        return self._names[key]

    def _value(self, one: Argument, values: Schema | None, parameters: Schema, strict: bool) -> str:
        if values is None:
            return ""
        schema = _with_definitions(values, parameters)
        key = "value", json.dumps(schema), strict
        if key not in self._names:
            self._names[key] = f"value{len(self.values)}"
            kinds = [kind for kind in types_of(values, parameters) if kind in TYPES]
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
        ways, rules = self._sequence(f"{at}", arguments)
        some = f"{ways} {rule['last']}"
        if form.empty is None or any(one.required for one in arguments):
            return [f"{begin} {rule['first']} {some}", *rules]
        none = form.empty + form.last
        if not arguments:
            return [f"{begin} {quoted(none)}"]
        # The lexer takes the longest match, so no alternative may be a prefix of another: factor out the common prefix.
        shared = quoted.shared(form.first, none)
        first, none = form.first[len(shared) :], none[len(shared) :]
        return [f"{begin} {quoted(shared)} ({quoted(first)} {some} | {quoted(none) or EMPTY})", *rules]

    def _sequence(self, at: str, arguments: list[Named]) -> tuple[str, list[str]]:
        """Return the expression of some of the arguments, in order, and its rules.  `at`: makes their names unique."""
        rules, ways = list[str](), list[str]()
        firsts = next((position + 1 for position, one in enumerate(arguments) if one.required), len(arguments))
        for position, one in enumerate(arguments):
            rest = f"r{at}_{position + 1}" if position + 1 < len(arguments) else ""
            if position < firsts:
                ways.append(f"a{at}_{position} {rest}")
            rules += self._argument(f"{at}_{position}", one)
            if position:
                again = f"({self._rule['between']} a{at}_{position})" + ("" if one.required else "?")
                rules.append(f"r{at}_{position}: {again} {rest}")
        return f"({' | '.join(ways)})", rules

    def _argument(self, at: str, one: Named) -> list[str]:
        text, value = (closing.replace(AGAIN, one.key) for closing in (self._form.text[1], self._form.value[1]))
        rule, ways, rules = self._rule, list[str](), list[str]()
        # A tag within a tag begins with the same text as a closing tag, so this text is a terminal of its own.
        carried = self._form.nested or ""
        closing = f"{self._quoted(carried)} {self._quoted(value.removeprefix(carried))}"
        if one.string:
            cut = self._quoted.first_special(text)
            if self._form.nested is not None:  # no string contains this marker, so the terminal ends with it
                cut = min(cut, len(self._form.barred[0]))
            if one.string not in self._strings:
                self._strings.add(one.string)
                rules.append(f"V{one.string}: B{one.string} {json.dumps(text[:cut]) if cut else ''}")
            ways.append(f"{rule['text']} V{one.string} {self._quoted(text[cut:])}")
        if one.value:
            ways.append(f"{rule['value']} @{one.value} {closing}")
        for number, container in enumerate(one.inner):
            if container.value:
                ways.append(f"{rule['value']} @{container.value} {closing}")
            elif container.members:
                some, more = self._members(f"{at}_{number}", container)
                ways.append(f"{rule['value']} {some} {self._quoted(value.removeprefix(carried))}")
                rules += more
            if container.empty is not None:
                ways.append(f"{rule['value']} {self._quoted(container.empty)} {closing}")
        return [f"a{at}: {json.dumps(one.key)} ({' | '.join(ways)})", *rules]

    def _members(self, at: str, container: NamedContainer) -> tuple[str, list[str]]:
        """Return the expression of the tags within a tag, and its rules."""
        assert self._form.nested is not None
        between = self._rule["between"]
        opens = f"{self._quoted(self._form.nested)} {between}"
        if container.least is None:
            some, rules = self._sequence(at, container.members)
            return f"{opens} {some}", rules
        [element] = container.members
        bounds = f"{container.least - 1},{'' if container.most is None else container.most - 1}"
        return f"{opens} a{at} ({between} a{at}){{{bounds}}}", self._argument(at, element)


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
