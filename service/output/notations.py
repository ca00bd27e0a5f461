"""Compiled response templates: the markers that open and close regions, and the notations of tool calls.

    dict in transformers' schema, or from the data file --compiled--> Template: fields, notations of calls, patterns

The data file `response_templates.json` extends transformers' schema.  Additional keys of a field of calls:

    alone          pattern of an opening marker without a call, which is dropped after a call
    also           list of further notations; each has its own markers, and inherits the field's other keys
    bare           calls without an opening marker: "open"; "closed" if a closing marker or the answer's end must follow
    names, arguments   additional keys for the name and the arguments
    keyed          calls such as {"weather": {"city": ...}}, in which the key is the name
    inner          the marker contains the name, and the arguments are under a key
    argument       {"open_pattern", "close_pattern"}: the tags around an argument, instead of `content_args`
    tag            pattern of a tag, for calls with "content": "nested", in which nested tags name the arguments.  Its
                   groups: `closes` ("/" of a closing tag), `key` (name), `bare` (name in a closing tag without marker)
    hides_markers  a call that cannot be read becomes content without its opening marker
    content        additionally "python"
    like           in `also`: name of a notation in `call_notations`, whose keys this one inherits.  In its pattern,
                   {mark} and {rest} are those keys of the field: the opening marker, and what follows it
    example        calls in the family's notation, for chat templates that show none (`call_form.py`)
    call_id        form of call ids, such as "functions.{name}:{index}"

An additional key of the content is `drop`: patterns of further markers that are never text.  In the `open_pattern` of
other fields, the group `shown` is the part of the marker that belongs to the text of the region.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from quire.service.output.lenient_json import Dialect

# Names of a response template's fields.  A field that is not listed is content, so that no text is dropped.
KINDS = {"reasoning_content": "reasoning", "reasoning": "reasoning", "thinking": "reasoning", "tool_calls": "calls"}
EXTENDED = (
    "alone", "also", "bare", "drop", "names", "arguments", "keyed", "argument", "hides_markers", "example", "call_id",
    "tag",
)  # fmt: skip
LINE = r"\A\s*"  # begins an opening marker that counts only at the start of the answer or of a line, or after a marker
_PLACE = re.compile(r"\{(\w+)(?:\.(\w+))?\}")
_VALUE = "(?P<value>.*?)"
SHOWN = "(?P<shown>"
NAMES, ARGUMENTS = ("name",), ("arguments", "parameters")
# Keys that some models write instead of NAMES and ARGUMENTS. They count only if their value is a name or an object.
OTHER_NAMES = ("tool_name", "function_name", "tool", "action")
OTHER_ARGUMENTS = ("args", "input", "params", "tool_input", "action_input", "kwargs")
CALLS = "tool_calls"  # key of a list of calls in an object that holds nothing else


class Anchor(msgspec.Struct, frozen=True, eq=False):
    """A marker's pattern, and whether a match at the end of a text may become longer with more text (`grows`)."""

    pattern: Any
    grows: bool


class Field(msgspec.Struct, frozen=True, eq=False):
    """A region between an opening and a closing marker, other than a call."""

    kind: str  # "reasoning" or "content"
    open: Anchor
    close: Anchor | None
    strips: bool  # drop white space next to the markers


class Notation(msgspec.Struct, frozen=True, eq=False):
    """One notation of calls of a model family.  The module's docstring explains the keys."""

    open: Anchor
    close: Anchor | None = None
    alone: Anchor | None = None  # an opening marker that has no call
    body: str = "json"  # key of `call_readers.READERS`
    captured: str = ""  # group of the opening marker's pattern that contains the name; "": none
    names: tuple[str, ...] = NAMES + OTHER_NAMES
    arguments: tuple[str, ...] = ARGUMENTS + OTHER_ARGUMENTS
    inner: bool = False
    keyed: bool = False
    bare: str = ""
    dialect: Dialect = Dialect()
    argument: tuple[str, str] = ("", "")  # patterns of the tags around an argument
    tag: Any = None  # pattern of a tag that names an argument
    hides_markers: bool = False
    described: Any = None  # field as compiled by transformers, for a notation that only transformers can parse

    @property
    def is_lined(self) -> bool:
        """Whether the opening marker counts only at the beginning of a line."""
        return bool(self.open.pattern.pattern.startswith(LINE))

    def holds_nothing(self, text: str) -> bool:
        """Return whether the text after an opening marker is only white space or the closing marker."""
        text = text.strip()
        return not text or (self.close is not None and self.close.pattern.fullmatch(text) is not None)


class Template(msgspec.Struct, frozen=True, eq=False):
    """A compiled response template."""

    start: Any  # regex of the beginning of an assistant's message
    fields: list[Field]
    notations: list[Notation]
    drop: list[Anchor]  # markers outside of regions that are dropped
    keeps_text: bool  # text outside of regions is content
    strips: bool  # drop white space next to markers outside of regions


def compiled(described: dict[str, Any]) -> Template:
    """Compile a response template.  Raises ValueError for a template that transformers cannot use."""
    plain = {**described, "fields": {name: _plain(field) for name, field in described["fields"].items()}}
    spec = _load(plain)
    fields, notations = [], []
    for name, field in spec.fields.items():
        if KINDS.get(name) == "calls":
            notations += list(_notations(described, name))
        elif field.open_re is not None:
            kind, strips = KINDS.get(name, "content"), field.content_args.get("strip", True)
            opened = str(described["fields"][name].get("open_pattern"))
            opens = Anchor(_pattern(opened), grows=True) if SHOWN in opened else _opening(field)
            fields.append(Field(kind, opens, _closing(field), strips))
    rest = spec.fields.get(spec.implicit)
    drop = [_closing(rest)] if rest is not None and rest.close_re is not None else []
    drop += [
        Anchor(_pattern(one), grows=True) for field in described["fields"].values() for one in field.get("drop", [])
    ]
    return Template(
        spec.start_anchor_re,
        fields,
        notations,
        [anchor for anchor in drop if anchor is not None],
        keeps_text=rest is not None,
        strips=rest is None or rest.content_args.get("strip", True),
    )


def _load(described: dict[str, Any]) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(described)


def _pattern(text: str) -> Any:
    import regex  # installed with transformers, which compiles its patterns with it

    return regex.compile(text, regex.DOTALL)


def _plain(field: dict[str, Any]) -> dict[str, Any]:
    """Return a field of a response template in the form that transformers reads, without our extensions."""
    found = {key: value for key, value in field.items() if key not in EXTENDED}
    if found.get("content") in ("python", "nested"):
        found["content"] = "text"
    if "argument" in field:
        found["content"] = "text"
    if SHOWN in (opened := str(found.get("open_pattern"))):
        found["open_pattern"] = opened.replace(SHOWN, "(?:")
    return found


def _opening(field: Any) -> Anchor:
    return Anchor(field.open_re, field.open_literals is None or field.open_literal_can_extend)


def _closing(field: Any) -> Anchor | None:
    if field.close_re is None:
        return None
    return Anchor(field.close_re, field.close_literals is None or field.close_literal_can_extend)


def _notations(described: dict[str, Any], name: str) -> Iterator[Notation]:
    field = described["fields"][name]
    base = {key: value for key, value in field.items() if key != "also"}
    for one in [{}, *field.get("also", [])]:
        whole = dict(base)
        for key in ("open", "close"):
            if key in one or f"{key}_pattern" in one:
                whole.pop(key, None)
                whole.pop(f"{key}_pattern", None)
        if one.get("content", base.get("content")) != base.get("content"):
            for key in ("content_args", "argument", "tag"):
                whole.pop(key, None)
        if one:
            for key in ("alone", "bare", "keyed", "hides_markers"):
                whole.pop(key, None)
        whole |= one
        spec = _load({**described, "fields": {name: _plain(whole)}}).fields[name]
        if spec.open_re is None:
            raise ValueError(f"field '{name}': calls without a marker that opens them")
        yield _notation(whole, spec)


def _notation(field: dict[str, Any], spec: Any) -> Notation:
    body, args = field.get("content", "text"), field.get("content_args", {})
    shape = _shape(field)
    common: dict[str, Any] = {
        "open": _opening(spec),
        "close": _closing(spec),
        "alone": Anchor(_pattern(field["alone"]), grows=True) if "alone" in field else None,
        "keyed": field.get("keyed", False),
        "bare": field.get("bare", ""),
        "hides_markers": field.get("hides_markers", False),
        "described": spec,
    }
    if shape is not None:
        common["captured"], common["inner"] = shape[0], bool(shape[0] and shape[2])
        common["names"] = _unique([shape[1], *field.get("names", []), *NAMES, *OTHER_NAMES])
        common["arguments"] = _unique([shape[2], *field.get("arguments", []), *ARGUMENTS, *OTHER_ARGUMENTS])
    tags = _tags(field)
    if shape is not None and body == "json" and not args.get("allow_non_json"):
        dialect = Dialect(tuple((begin, end) for begin, end in args.get("string_delims", [])))
        return Notation(**common, dialect=dialect)
    if shape is not None and shape[0] and tags is not None:
        return Notation(**common, body="tags", argument=tags)
    if body == "python":
        return Notation(**common, body="python")
    if body == "nested" and shape is not None and shape[0]:
        return Notation(**common, body="nested", tag=_pattern(field["tag"]))
    names = list(spec.open_re.groupindex)
    return Notation(**common | {"captured": names[0] if len(names) == 1 else ""}, body="whole")


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))


def _tags(field: dict[str, Any]) -> tuple[str, str] | None:
    """Return the patterns of the tags around an argument; None if there is no such pair."""
    if "argument" in field:
        return field["argument"]["open_pattern"], field["argument"]["close_pattern"]
    args = field.get("content_args", {})
    if field.get("content") != "xml-inline" or args.get("value_parser") or args.get("merge_duplicates"):
        return None
    opens, value, closes = str(args.get("tag_pattern")).partition(_VALUE)
    try:
        return (opens, closes) if value and closes and "key" in re.compile(opens).groupindex else None
    except re.error:
        return None


def _shape(field: dict[str, Any]) -> tuple[str, str, str] | None:
    """Return how a call's parts are found: (marker group of its name, key of its name, key of its arguments).

    "" stands for a part that is not found in this way.  Returns None if calls of this field have another shape."""
    transform = field.get("transform", "{content}")
    call = transform.get("function", transform) if isinstance(transform, dict) else transform
    if call == "{content}":
        return "", "", ""
    if not isinstance(call, dict):
        return None
    name, arguments = (_PLACE.fullmatch(str(call.get(key))) for key in ("name", "arguments"))
    if name is None or arguments is None:
        return None
    if field.get("transform_each"):
        return None if name[2] or arguments[2] else ("", name[1], arguments[1])
    if arguments[1] != "content":
        return None
    if name[1] == "content":
        return ("", name[2], arguments[2]) if name[2] and arguments[2] else None
    return (name[1], "", arguments[2] or "") if not name[2] else None


def marker_texts(described: dict[str, Any]) -> list[str]:
    """Return the texts and patterns of all markers in a response template."""
    found = list(_texts(described, ("start_anchor", "start_anchor_pattern")))
    for field in described["fields"].values():
        for one in [field, *field.get("also", []), field.get("argument", {}), field.get("content_args", {})]:
            found += _texts(one, ("open", "open_pattern", "close", "close_pattern", "tag_pattern", "drop"))
            found += [mark for pair in one.get("string_delims", []) for mark in pair]
    return found


def text_of_calls(described: dict[str, Any], key: str) -> str:
    """Return the value of an additional key (`example`, `call_id`) of the field of calls; "" without it."""
    return next((field[key] for field in described["fields"].values() if key in field), "")


def free_patterns(template: Template, described: dict[str, Any]) -> tuple[str, ...]:
    """Return the patterns of markers that may occur anywhere in an answer: all but those of calls and reasoning.

    Markers of reasoning are included unless the template has exactly one pair of them."""
    fields = template.fields if reasoning_texts(described) is None else []
    anchors = [*template.drop, *(anchor for field in fields for anchor in (field.open, field.close) if anchor)]
    return tuple(anchor.pattern.pattern for anchor in anchors)


def reasoning_texts(described: dict[str, Any]) -> tuple[str, str] | None:
    """Return the opening and closing marker of reasoning; None if there is no single pair of plain texts.

    If there are several closing markers, the first one is the model's; the others begin the text after the
    reasoning."""
    found = [field for name, field in described["fields"].items() if KINDS.get(name) == "reasoning"]
    opens, closes = ([*_texts(found[0], (key,))] if len(found) == 1 else [] for key in ("open", "close"))
    return (opens[0], closes[0]) if len(opens) == 1 and closes else None


def _texts(described: dict[str, Any], keys: Iterable[str]) -> Iterator[str]:
    for key in keys:
        value = described.get(key, [])
        yield from [value] if isinstance(value, str) else value
