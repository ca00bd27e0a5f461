"""Regions of a chat answer: content, reasoning and tool calls.  All contact with transformers' response parser.

    text of the answer --ResponseParser--> a region opens, grows, closes --RegionReader--> content, reasoning, calls

A response template says which markers open and close a region, and how a tool call is written.  A model ships it in its
tokenizer_config.json.  For known chat templates of models that ship none, `response_templates.json` has one.  No code
knows any single model.

What a `RegionReader` returns for the first N tokens depends on these tokens alone.  So an answer continues inside its
reasoning or a tool call, at any gateway.

White space next to a marker belongs to the marker.  A tool call that cannot be read becomes content, as it was written.
Arguments in JSON are passed on as the model writes them.  Other notations become JSON when their call is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("quire.gateway")

DATA = Path(__file__).with_name("response_templates.json")
# Names of a response template's fields.  A field that is not listed is content, so that no text is dropped.
KINDS = {"reasoning_content": "reasoning", "reasoning": "reasoning", "thinking": "reasoning", "tool_calls": "calls"}
HEAD_CHARS = 4096  # of a tool call: a name that has not appeared by then is read when the call is complete
KNOWN_CHARS = 2**16  # of which a region knows whether markers begin with them; beyond, any other character may
KEPT_CHARS = 4096  # of text that the parser has dealt with, before it is dropped
_STRING_MARK = re.compile(r'["\\]')
_JSON_MARK = re.compile(r'["\\{}\[\]]')
_PLACE = re.compile(r"\{(\w+)(?:\.(\w+))?\}")


class CallDelta(msgspec.Struct):
    """What is new of one tool call.  `index` counts the calls of a choice; the first delta of a call has its name."""

    index: int
    name: str | None
    arguments: str  # a part of their JSON


class TextDelta(msgspec.Struct):
    """New text of the content or of the reasoning."""

    text: str
    reasoning: bool = False


Part = TextDelta | CallDelta  # of an answer, in the order in which the model wrote them


class Reading(msgspec.Struct, frozen=True):
    """How one chat answer is read.  It is stored with the request, so that any gateway continues the answer."""

    opening: str  # what the prompt holds of the assistant's message, such as an opening marker of reasoning
    calls: bool = False  # the request has tools
    tools: list[dict[str, Any]] = []  # their names and the types of their arguments
    parallel: bool = True  # more than one call in an answer; else the answer ends with the first


# Patterns in which what precedes a marker counts.
_LOOKS_BEHIND = re.compile(r"\(\?<[=!]|\\[bBGmM]|(?<!\[)\^")


class _FirstChars:
    """The characters with which the markers of one region begin, learnt from its patterns as characters appear."""

    __slots__ = ("_begin", "_known", "_patterns")

    def __init__(self, patterns: list[Any]) -> None:
        """`patterns`: of the module `regex`, which tells whether a text could become a match."""
        self._known, self._begin = set[str](), set[str]()
        # None: any character may, where a pattern looks at what precedes it.
        self._patterns = None if any(_LOOKS_BEHIND.search(one.pattern) for one in patterns) else patterns

    def are_in(self, text: str) -> bool:
        """Return whether a marker may begin in a text that is not the first of an answer."""
        if self._patterns is None:
            return True
        if not self._known.issuperset(text):
            if len(self._known) > KNOWN_CHARS:
                return True
            new = set(text) - self._known
            self._begin |= {
                char for char in new if any(one.match("x" + char, 1, partial=True) for one in self._patterns)
            }
            self._known |= new
        return not self._begin.isdisjoint(text)


FirstChars = dict[str | None, _FirstChars]  # of regions


class _Head(msgspec.Struct, frozen=True):
    """Where a tool call in JSON holds its name and arguments."""

    pattern: re.Pattern[str]  # all before the arguments, with the name as its group if there is one
    capture: str = ""  # the group of the opening marker that holds the name


class _Strings:
    """Where the strings of a JSON text begin and end, as far as it was asked for."""

    __slots__ = ("_at", "_open")

    def __init__(self, at: int = 0) -> None:
        """`at`: where the JSON text begins."""
        self._at, self._open = at, False

    def are_open_at(self, text: str, at: int) -> bool:
        """Return whether `at` is inside a string.  Positions must not decrease from call to call."""
        while (mark := _STRING_MARK.search(text, self._at, at)) is not None:
            self._at = mark.end()
            if mark[0] == '"':
                self._open = not self._open
            elif self._open:
                self._at += 1  # the character that the backslash escapes
        self._at = max(self._at, at)
        return self._open


@cache
def _parser_class() -> type[Any]:
    """Return transformers' parser, extended by what a gateway needs.  Its import takes a second.

    It uses private methods and attributes, as the functions below and `RegionReader.finish` do, so `pyproject.toml`
    bounds the version."""
    from transformers.utils.chat_parsing import ResponseParser

    class Parser(ResponseParser):  # type: ignore[misc]
        """Adds to the events what a marker captured, how a region ended, and the raw text of one that is malformed."""

        _buffer: str
        _pos: int
        _strings: _Strings | None = None  # of the region that a marker opened
        _began = _body_end = 0  # in the buffer: where the region's marker begins, and where its text ends

        def _scan(self, watch: list[Any], eos: bool) -> tuple[Any, int]:
            return _scan_outside_strings(self, super()._scan, watch, eos)

        def _structured(self) -> bool:
            return self._current is not None and self._spec.fields[self._current].content != "text"

        def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
            self._body_end = self._pos + len(text)
            super()._accumulate(events, text)
            if not self._structured():
                self._body = ""  # it was passed on, and would grow with the answer

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
            self._began, self._body_end = m.start(), m.end()
            self._strings = _Strings(m.end())
            super()._open_explicit(events, field, m)
            events[-1]["captures"] = self._captures

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            name, before = self._current, len(events)
            raw = self._buffer[self._began : self._pos] if self._structured() else ""
            try:
                _check_tags(self._spec.fields.get(name), self._body)
                super()._close_current(events)
            except Exception:  # whatever a content parser raises is caused by what the model wrote
                events.append({"type": "region_close", "field": name, "value": None})
                self._reset_to_implicit()
            if len(events) > before:
                events[-1] |= {"raw": raw, "marker": self._pos > self._body_end}

    return Parser


def _pass_through(parser: Any, text: str, first: FirstChars) -> bool:
    """Add text to the open region if no marker can begin in it, and return whether that is so.

    That is most text.  It costs neither a search nor an event."""
    if not parser._opened or parser._pos < len(parser._buffer):
        return False
    if (chars := first.get(parser._current)) is None:
        watched = [field.open_re if kind == "open" else field.close_re for kind, field in parser._watchlist()]
        chars = first[parser._current] = _FirstChars(watched)
    if chars.are_in(text):
        return False
    parser._buffer += text
    parser._pos = parser._body_end = len(parser._buffer)
    if parser._structured():
        parser._body += text
    elif parser._pos > KEPT_CHARS:
        _drop_text(parser)
    return True


def _events_of(parser: Any, text: str) -> list[dict[str, Any]]:
    """Return the events of more text, in which markers are looked for."""
    events: list[dict[str, Any]] = parser.feed(text)
    if parser._pos > KEPT_CHARS and not parser._structured():
        _drop_text(parser)
    return events


def _drop_text(parser: Any) -> None:
    """Forget what the parser has dealt with, but one character: patterns may look behind."""
    cut = parser._pos - 1
    parser._buffer, parser._pos, parser._body_end = parser._buffer[cut:], 1, parser._body_end - cut


def _scan_outside_strings(parser: Any, scan: Callable[..., Any], watch: list[Any], eos: bool) -> tuple[Any, int]:
    """Return the next marker.  What looks like a closing one inside a string of a call in JSON is none."""
    best, hold = scan(watch, eos)
    at, strings, field = parser._pos, parser._strings, parser._spec.fields.get(parser._current)
    if strings is None or KINDS.get(parser._current) != "calls" or field.content != "json" or field.content_args:
        return best, hold
    while best is not None and strings.are_open_at(parser._buffer, best[2].start()):
        parser._pos = best[2].start() + 1
        best, hold = scan(watch, eos)
    parser._pos = at
    return best, hold


def _check_tags(field: Any, body: str) -> None:
    """Raise ValueError for what transformers would drop of a call in XML: text between tags, a repeated argument."""
    import regex  # what transformers compiles these patterns with; it comes with transformers

    if field is None or field.content != "xml-inline":
        return
    pattern = regex.compile(field.content_args["tag_pattern"], regex.DOTALL)
    if pattern.sub("", body).strip():
        raise ValueError("text between tags")
    names = [match["key"] for match in pattern.finditer(body)]
    if len(set(names)) < len(names):
        raise ValueError("an argument is given twice")


class ResponseTemplate:
    """A response template, ready to read answers.  Immutable, but for what it learns of its patterns."""

    def __init__(self, described: dict[str, Any], name: str = "") -> None:
        """`name`: for the log.  Raises ValueError for a template that transformers cannot use."""
        self.name = name
        parser = _parser_class()
        self._full = parser(described, prefix="")._spec
        fields: dict[str, Any] = described["fields"]
        rest = {name: field for name, field in fields.items() if KINDS.get(name) != "calls"}
        self._without_calls = parser({**described, "fields": rest}, prefix="")._spec if rest else self._full
        self._first: dict[bool, FirstChars] = {True: {}, False: {}}  # whether calls are looked for
        self.has_calls = len(rest) < len(fields)
        self.has_reasoning = any(KINDS.get(name) == "reasoning" for name in rest)
        self.call_markers = [
            text for name, field in fields.items() if KINDS.get(name) == "calls" for text in _texts(field, ("open",))
        ]
        self.reasoning_markers = _literal_markers(fields)
        self.heads = {name: _head(field) for name, field in fields.items() if KINDS.get(name) == "calls"}
        self.casts = None in self.heads.values()  # arguments that are no JSON get the types of their schema
        self.keeps_spaces = {
            name for name, field in fields.items() if not field.get("content_args", {}).get("strip", True)
        }
        self._markers = list(_texts(described, ("start_anchor", "start_anchor_pattern"))) + [
            text
            for field in fields.values()
            for text in _texts(field, ("open", "open_pattern", "close", "close_pattern"))
        ]

    def has_marker(self, special: str) -> bool:
        """Return whether a special token is a part of a marker, so that the parser must see it."""
        return any(special in text or re.escape(special) in text for text in self._markers)

    def opening(self, prompt: str) -> str | None:
        """Return what follows the last beginning of an assistant's message in a prompt; None if there is none."""
        end = None
        for match in self._full.start_anchor_re.finditer(prompt):
            end = match.end()
        return None if end is None else prompt[end:]

    def reader(self, reading: Reading) -> RegionReader:
        """Return a reader of one answer, at its start."""
        spec = self._full if reading.calls else self._without_calls
        return RegionReader(self, spec, self._first[reading.calls], reading)


def _literal_markers(fields: dict[str, Any]) -> tuple[str, str] | None:
    """Return the markers that open and close reasoning; None where there is no one pair of plain text."""
    found = [field for name, field in fields.items() if KINDS.get(name) == "reasoning"]
    if len(found) != 1 or not all(isinstance(found[0].get(key), str) for key in ("open", "close")):
        return None
    return found[0]["open"], found[0]["close"]


def _texts(described: dict[str, Any], keys: Iterable[str]) -> Iterable[str]:
    for key in keys:
        value = described.get(key, [])
        yield from [value] if isinstance(value, str) else value


def _head(field: dict[str, Any]) -> _Head | None:
    """Return where a call of this field holds its name and arguments; None: it is read when it is complete."""
    if field.get("content") != "json" or field.get("content_args") or field.get("transform_each"):
        return None
    transform = field.get("transform", "{content}")
    call = transform.get("function", transform) if isinstance(transform, dict) else transform
    if call == "{content}":
        call = {"name": "{content.name}", "arguments": "{content.arguments}"}
    name, arguments = (_PLACE.fullmatch(str(call.get(key))) for key in ("name", "arguments"))
    if name is None or arguments is None or arguments[1] != "content":
        return None
    if name[1] != "content":
        before = rf'\{{\s*"{arguments[2]}"\s*:\s*' if arguments[2] else ""
        return _Head(re.compile(rf"\s*{before}(?=\{{)"), capture=name[1])
    if not name[2] or not arguments[2]:
        return None
    text = r'"(?:[^"\\]|\\.)+"'
    return _Head(re.compile(rf'\s*\{{\s*"{name[2]}"\s*:\s*({text})\s*,\s*"{arguments[2]}"\s*:\s*(?=\{{)', re.DOTALL))


class _Call:
    """A tool call as it is written: its name and arguments, as soon as they are known."""

    __slots__ = ("_depth", "_done", "_escaped", "_head", "_quoted", "_written", "name", "tail")

    def __init__(self, head: _Head | None, captures: dict[str, str]) -> None:
        self._head, self._written = head, ""
        self.name = ""  # once it is known, if it is known before the call is complete
        self.tail = ""  # what follows the arguments
        self._depth, self._quoted, self._escaped, self._done = 0, False, False, False
        if head is not None and head.capture:
            self._written = captures.get(head.capture, "").strip()
            self._head = head if self._written else None

    def push(self, text: str) -> str:
        """Add text of the call; return the part of its arguments that may be sent now."""
        if self.name:
            return self._arguments(text)
        head = self._head
        if head is None:
            return ""
        # With a captured name, `_written` holds the name, a line end and the text.
        if head.capture and "\n" not in self._written:
            self._written += "\n"
        self._written += text
        captured, _, rest = self._written.partition("\n") if head.capture else ("", "", self._written)
        match = head.pattern.match(rest)
        if match is None:
            if len(rest) > HEAD_CHARS:
                self._head = None
            return ""
        try:
            self.name = captured or json.loads(match[1], strict=False)
        except ValueError:
            self._head = None
            return ""
        return self._arguments(rest[match.end() :])

    def _arguments(self, text: str) -> str:
        """Return what belongs to the arguments: all up to the brace that closes them."""
        if self._done:
            self.tail += text
            return ""
        at = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        while (mark := _JSON_MARK.search(text, at)) is not None:
            at, char = mark.end(), mark[0]
            if self._quoted:
                if char == "\\":
                    self._escaped = at == len(text)
                    at += 1
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._done, self.tail = True, text[at:]
                    return text[:at]
        return text


class RegionReader:
    """Cuts the text of one answer into regions, as it arrives."""

    __slots__ = (
        "_after_marker",
        "_call",
        "_dropped",
        "_ending",
        "_first",
        "_held",
        "_kind",
        "_new",
        "_parallel",
        "_parser",
        "_strips",
        "_template",
        "calls",
        "ended",
        "reasoning",
    )

    def __init__(self, template: ResponseTemplate, spec: Any, first: FirstChars, reading: Reading) -> None:
        self._template, self._first, self._parallel = template, first, reading.parallel
        self._parser = _parser_class()(spec, prefix="", tools=reading.tools)
        self.reasoning = False  # the reasoning is open
        self.ended = False  # no more calls are wanted: the answer is complete
        self.calls = 0
        self._kind, self._strips = "content", True  # of the open region
        self._after_marker = False  # only white space has followed the last marker
        self._held = self._dropped = ""  # white space that a marker may follow, and that one has followed
        self._ending = ""  # how the answer ends, at its end
        self._call = _Call(None, {})
        self._new: list[Part] = []
        self.push(reading.opening)
        self.take_parts()
        # All of that was in the prompt, which may even hold an earlier message with calls.
        self._held, self.calls, self.ended = "", 0, False

    def push(self, text: str) -> None:
        """Add text of the answer."""
        if not text or self.ended:
            return
        if _pass_through(self._parser, text, self._first):
            self._grow(text)
        else:
            for event in _events_of(self._parser, text):
                self._apply(event)

    def finish(self, *, cut: bool) -> None:
        """End the answer.  `cut`: it could have been longer, so a call without its closing marker is incomplete."""
        if not self.ended:
            self._ending = "cut" if cut else "whole"
            events: list[dict[str, Any]] = []
            self._parser._process(events, eos=True)
            for event in events:
                self._apply(event)

    def take(self) -> tuple[str, str, list[CallDelta]]:
        """Return content, reasoning and calls that are new since the last call."""
        return split(self.take_parts())

    def take_parts(self) -> list[Part]:
        """Return the same in the order in which the model wrote it.  Text of one region is one part."""
        found, self._new = self._new, []
        return found

    @property
    def waiting_space(self) -> str:
        """White space at the end of the content so far, which is dropped if a marker follows it."""
        return self._held if self._kind == "content" else ""

    def _apply(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if self.ended:
            return
        if kind == "region_chunk":
            self._grow(event["text"])
        elif kind == "region_open":
            self._open(event)
        elif self._kind == "calls":
            self._close_call(event)
        else:
            self._close_text(event["marker"])

    def _grow(self, text: str) -> None:
        if self._kind == "calls":
            self._grow_call(text)
        else:
            self._add_text(text)

    def _open(self, event: dict[str, Any]) -> None:
        name = event["field"]
        self._kind = KINDS.get(name, "content")
        self._strips = name not in self._template.keeps_spaces
        self.reasoning = self._kind == "reasoning"
        if (captures := event.get("captures")) is not None:  # a marker opened it
            self._after_marker = True
            if self._kind == "calls":
                self._call = _Call(self._template.heads[name], captures)
            else:
                self._dropped = ""

    def _add_text(self, text: str) -> None:
        if self._strips:
            if self._after_marker:
                text = text.lstrip()
                if not text:
                    return
            text = self._held + text
            bare = text.rstrip()
            self._held, text = text[len(bare) :], bare
        self._after_marker = False
        self._pass_on(text, reasoning=self._kind == "reasoning")

    def _pass_on(self, text: str, *, reasoning: bool = False) -> None:
        last = self._new[-1] if self._new else None
        if isinstance(last, TextDelta) and last.reasoning == reasoning:
            last.text += text
        elif text:
            self._new.append(TextDelta(text, reasoning))

    def _close_text(self, marker: bool) -> None:
        if marker:
            self._dropped, self._after_marker = self._held, True
        else:
            self._pass_on(self._held, reasoning=self._kind == "reasoning")
        self._held = ""
        self._kind, self.reasoning = "content", False

    def _grow_call(self, text: str) -> None:
        call, known = self._call, bool(self._call.name)
        arguments = call.push(text)
        if call.name and not known:
            self._new.append(CallDelta(self.calls, call.name, arguments))
            self.calls += 1
        elif arguments:
            self._new.append(CallDelta(self.calls - 1, None, arguments))

    def _close_call(self, event: dict[str, Any]) -> None:
        value, head = event["value"], self._call._head
        self._kind, self._after_marker = "content", event["marker"]
        if self._call.name:
            if value is None:  # more than the arguments was written, and it is no JSON
                self._pass_on(self._call.tail)
        else:
            incomplete = self._ending == "cut" and not event["marker"] and head is None
            found = None if incomplete else _calls_of(value)
            if found is None:
                self._pass_on(self._dropped + event["raw"])
                self._after_marker = False
            for name, arguments in (found or [])[: None if self._parallel else 1]:
                self._new.append(CallDelta(self.calls, name, arguments))
                self.calls += 1
        self._dropped = ""
        self.ended = self.calls > 0 and not self._parallel


def split(parts: list[Part]) -> tuple[str, str, list[CallDelta]]:
    """Return content, reasoning and calls of parts."""
    content, reasoning, calls = "", "", list[CallDelta]()
    for part in parts:
        if isinstance(part, CallDelta):
            calls.append(part)
        elif part.reasoning:
            reasoning += part.text
        else:
            content += part.text
    return content, reasoning, calls


def _calls_of(value: Any) -> list[tuple[str, str]] | None:
    """Return name and arguments, as JSON, of the calls that a region holds; None if it holds anything else."""
    found = []
    for one in value if isinstance(value, list) else [value]:
        call = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments")
        if isinstance(arguments, dict) or arguments is None:
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        if not isinstance(name, str) or not name.strip() or not isinstance(arguments, str):
            return None
        found.append((name.strip(), arguments))
    return found or None


# ------------------------------------------------------------------------------------------------- known chat templates


class _Known(msgspec.Struct, forbid_unknown_fields=True):
    """Which response template belongs to a chat template."""

    response_template: str
    sha256: str = ""  # of the chat template, as `digest` computes it
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


def find(chat_template: str, shipped: Any = None) -> ResponseTemplate | None:
    """Return the response template of a model: the one that it ships, or a known one; None: every answer is content."""
    if shipped is not None:
        try:
            return ResponseTemplate(shipped, "the model's own")
        except Exception as error:  # transformers checks it with a dozen messages
            log.warning("the model's response_template cannot be used, so a known one is looked for: %s", error)
    name = name_of(chat_template)
    return ResponseTemplate(known().response_templates[name], name) if name is not None else None
