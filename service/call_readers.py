"""Readers of tool calls, one for each kind of notation: text of a call -> its name, and arguments as valid JSON.

    opening marker --RegionReader--> a reader of the notation --> parts of calls, and how the text goes on

    json    {"name": ..., "arguments": {...}}, a list of these, or the arguments alone where the marker holds the name
    tags    <parameter=city>Paris</parameter> ...
    python  [weather(city="Paris"), ...]
    whole   any other notation that transformers can read, once it is complete

A reader looks at each character a bounded number of times.  It never passes on arguments that are no JSON object, and
never a call without the arguments that were written: what it cannot read is `BROKEN`, and becomes content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Literal, Protocol

import msgspec

from service.argument_types import Tools, untyped
from service.lenient_json import Event, JsonReader, repaired
from service.markers import Markers, Match
from service.notations import Notation

STREAM_CHARS = 256  # of one argument in tags: a longer string is passed on as it is written
BESIDE = frozenset({"type", "id", "index", "tool_call_id"})  # keys of a call that are no arguments
_NOTHING = re.compile(r"\s*(\{\s*\}|null|\"\s*\")?\s*")  # as arguments
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)

End = Literal["", "cut", "whole"]  # of the answer: not reached; it could have been longer; the model ended it
CallPart = tuple[str | None, str]  # a new call's name or None, and a part of its arguments


class Status(Enum):
    """How a reader goes on."""

    MORE = auto()  # it needs more text
    NEXT = auto()  # what was read is complete, and another call begins here
    DONE = auto()  # the text of calls ends here
    BROKEN = auto()  # what was read since the beginning, or since NEXT, is no call


class Context(msgspec.Struct, frozen=True):
    """What a reader knows of its answer."""

    notation: Notation
    name: str  # that the marker holds, or ""
    tools: Tools
    parallel: bool
    ends: Markers  # markers that end calls, of the kinds `close`, `call`, `argument` and `junk`
    value_ends: Markers  # markers that end an argument in tags


class CallReader(Protocol):
    """Reads the text after an opening marker."""

    parts: list[CallPart]  # new ones; the caller takes them
    committed: bool  # a part of the current call was passed on

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """Read on from a position; return where it stands, and how it goes on.

        After MORE the rest of the text is given again, with more."""


class JsonCalls:
    """Reads calls in JSON."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context, self._notation = context, context.notation
        self._value: _JsonCall | _JsonList | None = None  # that is being read
        self._fence = False  # within the word after the backticks of a code fence
        self._first = True
        self._waiting: list[CallPart] = []  # complete, until it is known that they are calls
        self._rest = False  # of the call's object, only what follows its arguments is left
        self._blank = True  # and that is nothing but spaces, so far

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """Read on; see `CallReader`."""
        while True:
            if self._value is None:
                at, status = self._between(text, at, end)
                if status is not None:
                    return at, status
            at, event = self._value_read(text, at, end)
            if event is not None:
                return at, event

    def _between(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        """Skip what stands before a value; begin the value or tell how it goes on."""
        while at < len(text):
            match, pending = self._context.ends.at(text, at, final=bool(end))
            if pending:
                return at, Status.MORE
            if match is not None and match.marker.kind in ("close", "call"):
                closes = match.marker.kind == "close"
                return match.found.end() if closes else at, self._end(closed=closes)
            if not self._is_junk(text[at]):
                break
            at += 1
        else:
            return at, Status.MORE if not end else self._end(closed=False)
        named = bool(self._context.name) and not self._notation.inner
        again = not self._first and not named and (self._context.parallel or self._notation.bare == "closed")
        begins = text[at] == "{" or (text[at] == "[" and not named)
        if begins and (self._first or again):
            return self._begin(text, at)
        if self._first or self._notation.bare == "closed":
            return at, Status.BROKEN
        return at, Status.DONE

    def _begin(self, text: str, at: int) -> tuple[int, Status | None]:
        first, self._first = self._first, False
        whole = text[at] == "[" or self._notation.keyed
        self._value = _JsonList(self._context) if whole else _JsonCall(self._context)
        if first or self._notation.bare == "closed":
            return at, None
        self.committed = False
        return at, Status.NEXT

    def _is_junk(self, char: str) -> bool:
        """Return whether a character between values means nothing: spaces, code fences, brackets and commas."""
        if char == "`":
            self._fence = True
        elif char.isspace():
            self._fence = False
        else:
            return (self._fence and char.isalpha()) or (not self._first and char in ",;}])")
        return True

    def _end(self, *, closed: bool) -> Status:
        """End the calls at a marker or at the end of the answer."""
        if self._first:
            if not (closed and self._context.name):
                return Status.BROKEN
            self.parts.append((self._context.name, "{}"))
        self.parts += self._waiting
        self._waiting = []
        return Status.DONE

    def _value_read(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        """Read the value; None: it is complete."""
        value, before = self._value, at
        assert value is not None
        at, event = value.read(text, at, end)
        self._blank = self._blank and not text[before:at].strip()
        if self._notation.bare != "closed":
            self.parts += value.parts
            self.committed = self.committed or (value.committed and not self._rest)
            value.parts = []
        if event is Event.VALUE:  # its arguments are complete and were passed on
            self.committed, self._rest, self._blank = False, True, True
            return at, Status.NEXT
        if event is Event.MORE and not end:
            return at, Status.MORE
        rest, self._rest, self._value = self._rest, False, None
        if rest:
            done = event is Event.END or self._blank or (event is not Event.BAD and value.is_closing)
            return at, None if done and event is not Event.BAD else Status.DONE if done else Status.BROKEN
        if event is Event.BAD:
            return at, Status.DONE if self.committed else Status.BROKEN
        complete = value.end(event, end)
        (self._waiting if self._notation.bare == "closed" else self.parts).extend(value.parts)
        return at, None if complete else Status.BROKEN


class _JsonCall:
    """Reads one object that is a call, or the arguments of one."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._notation, self._tools = context.notation, context.tools
        self._named = bool(context.name) and not context.notation.inner
        self._json = JsonReader(context.notation.dialect, context.ends, watch=0 if self._named else 1)
        self._name = context.name
        self._slot = "arguments" if self._named else ""
        self._json.loosens = self._named
        self._collected: list[str] = []  # of the slot
        self._arguments: list[str] = []
        self._complete = False  # the arguments were read to their end
        self._filled = False  # and they are more than an empty object
        self._is_rest = False  # and they were passed on
        self._pairs = self._words = 0  # colons before the arguments, and bare values before the name
        self._extra = False  # there are keys that are no part of a call

    def read(self, text: str, at: int, end: End) -> tuple[int, Event]:
        """Read on, up to the end of the object."""
        while True:
            at, event = self._json.read(text, at, final=bool(end))
            piece = self._json.take()
            if event is Event.KEY:
                self._begin_slot(self._json.key)
                if self._notation.bare and self._extra and not self._arguments:
                    return at, Event.BAD
                continue
            self._collect(piece)
            if event is Event.VALUE:
                if not self._end_slot():
                    return at, Event.BAD
                if self.committed and self._complete and not self._is_rest:
                    self._is_rest = True
                    return at, event
                continue
            return at, Event.BAD if event is Event.BAD and not self.committed else event

    @property
    def is_closing(self) -> bool:
        """Whether nothing but a closing bracket is missing."""
        return self._json.is_between and self._json.depth == 1

    def end(self, event: Event, end: End) -> bool:
        """End the object; return whether it is a call.  `event`: why reading ended."""
        if event is not Event.END and end != "cut":
            self._json.complete(self._json.watch)
            self._collect(self._json.take())
        elif self.committed and event is not Event.END:
            self._json.flush()
            self._collect(self._json.take())
        if self.committed:
            return True
        if event is not Event.END and not self._complete:
            return False
        if not self._name:
            return False
        arguments = self._written()
        if arguments is None:
            return False
        if not arguments:
            if self._extra or self._notation.bare:
                return False
            arguments = "{}"
        self._commit(arguments)
        return self.committed

    def _begin_slot(self, key: str) -> None:
        self._collected = []
        if key == "function" and self._json.watch == 1 and not self._name:
            self._slot, self._json.watch, self._words = "function", 2, self._json.words
        elif key in self._notation.names and not self._name:
            self._slot, self._words = "name", self._json.words
        elif key in self._notation.arguments and not self.committed and not self._filled:
            self._slot, self._arguments, self._complete = "arguments", [], False
            self._pairs = self._json.pairs
            self._json.loosens = bool(self._name) and self._notation.bare != "closed"
        else:
            self._slot = "other"
            self._extra = self._extra or key not in BESIDE

    def _collect(self, piece: str) -> None:
        if not piece:
            return
        if self._slot in ("name", "function"):
            self._collected.append(piece)
        elif self._slot == "arguments" and not self._complete:
            if self.committed:
                self.parts.append((None, piece))
                return
            self._arguments.append(piece)
            self._try_commit()

    def _try_commit(self) -> None:
        """Pass the call on as soon as its name and its first argument's name are known."""
        known = self._filled if self._complete else self._json.pairs > self._pairs
        if not self._name or not known or self._notation.bare == "closed":
            return
        if self._arguments and "".join(self._arguments[:2]).lstrip().startswith("{"):
            self._commit("".join(self._arguments))

    def _commit(self, arguments: str) -> None:
        if self._notation.bare and self._tools and self._name not in self._tools:
            return
        self.committed = True
        self.parts.append((self._name, arguments.lstrip()))

    def _end_slot(self) -> bool:
        """End the value of a key; return whether it may belong to a call."""
        slot, self._slot = self._slot, ""
        if self._json.depth == 1:
            self._json.watch = 1
        if slot == "arguments":
            self._complete, self._json.strict, self._json.loosens = True, True, False  # anything else may follow
            self._filled = _NOTHING.fullmatch("".join(self._arguments)) is None
        elif slot in ("name", "function"):
            value = _loaded("".join(self._collected))
            if isinstance(value, str) and self._json.words == self._words:
                self._name = value.strip()
                if not self._name or (self._notation.bare and self._tools and self._name not in self._tools):
                    return False
                self._try_commit()
            elif slot == "name":
                return False
        return True

    def _written(self) -> str | None:
        """Return the arguments as an object; "": there are none; None: they are none."""
        text = "".join(self._arguments).strip()
        if not text or text == "null":
            return ""
        if text.startswith('"'):
            return _object(_loaded(text))
        return text if text.startswith("{") else None


class _JsonList:
    """Reads a list of calls; nothing is known before it is complete."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context = context
        self._json = JsonReader(context.notation.dialect, context.ends)
        self._json.strict = False
        self._text: list[str] = []

    def read(self, text: str, at: int, end: End) -> tuple[int, Event]:
        """Read on, up to the end of the list."""
        at, event = self._json.read(text, at, final=bool(end))
        self._text.append(self._json.take())
        return at, event

    @property
    def is_closing(self) -> bool:
        """Whether nothing but a closing bracket is missing."""
        return self._json.is_between and self._json.depth == 1

    def end(self, event: Event, end: End) -> bool:
        """End the list; return whether it holds calls."""
        if event is not Event.END:
            if end == "cut" or not self.is_closing:
                return False
            self._json.complete()
            self._text.append(self._json.take())
        context = self._context
        calls = calls_of(_loaded("".join(self._text)), context.notation)
        if calls is None:
            return False
        if context.notation.bare and context.tools and any(name not in context.tools for name, _ in calls if name):
            return False
        self.parts += calls if context.parallel else calls[:1]
        self.committed = True
        return True


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(value: Any) -> str | None:
    """Return arguments as the JSON of an object; "": there are none; None: they are none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        found = repaired(value)
        return found if found is not None and found.lstrip().startswith("{") else None
    return None


def calls_of(value: Any, notation: Notation) -> list[CallPart] | None:
    """Return names and arguments of the calls that a value holds; None if it holds anything else."""
    found: list[CallPart] = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict):
            return None
        if notation.keyed and len(one) == 1 and "name" not in one:
            [(name, given)] = one.items()
            arguments = _object(given)
        else:
            function = one.get("function")
            call = function if isinstance(function, dict) else one
            names = [call[key] for key in notation.names if isinstance(call.get(key), str)]
            name = (names + ([function] if isinstance(function, str) else []) + [""])[0].strip()
            every = [_object(call[key]) for key in notation.arguments if key in call]
            arguments = None if None in every else next((one for one in every if one and one != "{}"), "")
            known = {*notation.names, *notation.arguments, "function", *BESIDE}
            if not arguments and not known.issuperset(call):
                return None
        if not name or arguments is None:
            return None
        found.append((name, arguments or "{}"))
    return found or None


class TagCalls:
    """Reads the arguments of one call, each between tags of its own."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context, self._name = context, context.name
        self._json: JsonCalls | None = None  # reads arguments that are JSON after all
        self._written: list[str] = []  # arguments that were not passed on yet
        self._keys = set[str]()
        self._key: str | None = None  # of the open argument
        self._type = ""  # that its tag says: "true" for a string, "false" for anything else
        self._value: list[str] = []
        self._length = 0
        self._streams = False

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """Read on; see `CallReader`."""
        while True:
            if self._json is not None:
                at, status = self._json.read(text, at, end)
                self.parts, self._json.parts = self.parts + self._json.parts, []
                self.committed = self._json.committed
                return at, status
            step = self._between if self._key is None else self._argument
            at, found = step(text, at, end)
            if found is not None:
                return at, found

    def _between(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        """Read what stands between arguments."""
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            if not end:
                return at, Status.MORE
            return at, Status.BROKEN if end == "cut" and not self.committed else self._finish(cut=end == "cut")
        if text[at] == "{" and not self._keys:
            self._json = JsonCalls(self._context)
            return at, None
        match, pending = self._context.ends.at(text, at, final=bool(end))
        if pending:
            return at, Status.MORE
        kind = match.marker.kind if match is not None else ""
        if match is not None and kind == "argument":
            key = match.found["key"].strip()
            if key in self._keys and not self.committed:
                return at, Status.BROKEN
            self._open(key, match)
            return match.found.end(), None
        if match is not None and kind == "junk":
            return match.found.end(), None
        if match is not None and kind in ("close", "call"):
            return match.found.end() if kind == "close" else at, self._finish()
        return at, self._finish() if self.committed else Status.BROKEN

    def _open(self, key: str, match: Match) -> None:
        self._key, self._value, self._length, self._streams = key, [], 0, False
        self._keys.add(key)
        self._type = (match.found.groupdict().get("string") or "").lower()

    def _argument(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        """Read the value of the open argument."""
        match, upto = self._context.value_ends.next(text, at, final=bool(end))
        while match is not None and match.marker.kind == "argument" and not self._is_next(match):
            match, upto = self._context.value_ends.next(text, upto + 1, final=bool(end))
        self._grow(text[at:upto])
        if match is not None:
            self._close()
            return match.found.end() if match.marker.kind == "closes" else upto, None
        if not end:
            return upto, Status.MORE
        if not self.committed:
            return upto, Status.BROKEN
        if end == "whole":
            self._close()
        elif not self._streams:
            begun = json.dumps("".join(self._value), ensure_ascii=False)[:-1]
            self._written.append(f", {json.dumps(self._key, ensure_ascii=False)}: {begun}")
        return upto, self._finish(cut=end == "cut")

    def _is_next(self, match: Match) -> bool:
        """Return whether the tag of an argument follows on one that was not closed, rather than being text."""
        tools, key = self._context.tools, match.found["key"].strip()
        return key not in self._keys and (not tools or tools.takes(self._name, key))

    def _grow(self, text: str) -> None:
        if not text:
            return
        if self._streams:
            self.parts.append((None, json.dumps(text, ensure_ascii=False)[1:-1]))
            return
        self._value.append(text)
        self._length += len(text)
        assert self._key is not None
        is_text = self._type == "true" or (not self._type and self._context.tools.is_text(self._name, self._key))
        if is_text and self._length > STREAM_CHARS and not "".join(self._value[:2]).lstrip().startswith("<![CDATA["):
            self._pass_on()
            comma = ", " if len(self._keys) > 1 else ""
            begun = json.dumps("".join(self._value), ensure_ascii=False)[:-1]
            self.parts.append((None, f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {begun}"))
            self._streams = True

    def _close(self) -> None:
        """End the open argument."""
        key, self._key = self._key, None
        assert key is not None
        if self._streams:
            self.parts.append((None, '"'))
            return
        text = "".join(self._value)
        if (data := _CDATA.fullmatch(text)) is not None:
            text = data[1]
        if self._type:
            value = untyped(text) if self._type == "false" else json.dumps(text, ensure_ascii=False)
        else:
            value = self._context.tools.value(self._name, key, text)
        comma = ", " if len(self._keys) > 1 else ""
        self._written.append(f"{comma}{json.dumps(key, ensure_ascii=False)}: {value}")
        if self.committed:
            self._pass_on()

    def _pass_on(self) -> None:
        written, self._written = "".join(self._written), []
        if self.committed:
            self.parts.append((None, written))
        else:
            self.committed = True
            self.parts.append((self._name, "{" + written))

    def _finish(self, *, cut: bool = False) -> Status:
        self._pass_on()
        if not cut:
            self.parts.append((None, "}"))
        return Status.DONE


class PythonCalls:
    """Reads calls written as in Python."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context = context
        self._json: JsonCalls | None = None  # reads calls that are JSON after all
        self._reader: JsonReader | None = None  # of the open call's arguments
        self._name = ""
        self._first = True

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """Read on; see `CallReader`."""
        while True:
            if self._json is not None:
                at, status = self._json.read(text, at, end)
                self.parts, self._json.parts = self.parts + self._json.parts, []
                self.committed = self._json.committed
                return at, status
            step = self._between if self._reader is None else self._arguments
            at, found = step(text, at, end)
            if found is not None:
                return at, found

    def _between(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        while at < len(text) and (text[at].isspace() or text[at] in ("[" if self._first else "[],;)")):
            at += 1
        if at == len(text):
            return at, Status.MORE if not end else Status.BROKEN if self._first else Status.DONE
        if text[at] == "{" and self._first:
            self._json = JsonCalls(self._context)
            return at, None
        match, pending = self._context.ends.at(text, at, final=bool(end))
        if pending:
            return at, Status.MORE
        kind = match.marker.kind if match is not None else ""
        if match is not None and kind == "name" and (self._first or self._context.parallel):
            if not self._first and self.committed:
                self.committed = False
                return at, Status.NEXT
            self._first = False
            self._name, self._reader = match.found["name"], JsonReader(None, self._context.ends)
            self._reader.begin_call()
            self._reader.loosens = True
            return match.found.end(), None
        if self._first:
            return at, Status.BROKEN
        return match.found.end() if match is not None and kind == "close" else at, Status.DONE

    def _arguments(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        reader = self._reader
        assert reader is not None
        at, event = reader.read(text, at, final=bool(end))
        if event is Event.BAD or (event is not Event.END and not self.committed and not reader.pairs and end):
            return at, Status.BROKEN
        if event is Event.MORE and not end:
            self._pass_on(reader, complete=False)
            return at, Status.MORE
        if event is not Event.END:
            if not reader.pairs and not self.committed:
                return at, Status.BROKEN
            if end == "cut":
                reader.flush()
                self._pass_on(reader, complete=False)
                return at, Status.DONE
            reader.complete()
        self._pass_on(reader, complete=True)
        self._reader = None
        return at, None

    def _pass_on(self, reader: JsonReader, *, complete: bool) -> None:
        if not complete and not reader.pairs:
            return
        if piece := reader.take():
            self.parts.append((None if self.committed else self._name, piece))
            self.committed = True


class WholeCalls:
    """Reads calls in a notation that only transformers knows, once they are complete."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context = context
        self._body: list[str] = []

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """Read on; see `CallReader`."""
        match, upto = self._context.ends.next(text, at, final=bool(end))
        while match is not None and match.marker.kind != "close":
            match, upto = self._context.ends.next(text, upto + 1, final=bool(end))
        self._body.append(text[at:upto])
        if match is None and not end:
            return upto, Status.MORE
        calls = None if match is None and end == "cut" else self._calls()
        if calls is None:
            return match.found.end() if match is not None else upto, Status.BROKEN
        self.parts += calls if self._context.parallel else calls[:1]
        return match.found.end() if match is not None else upto, Status.DONE

    def _calls(self) -> list[CallPart] | None:
        from transformers.utils.chat_parsing.content_parsers import process_field

        notation = self._context.notation
        try:
            value = process_field("".join(self._body), notation.described, {notation.captured: self._context.name})
        except Exception:  # whatever a content parser raises is caused by what the model wrote
            return None
        return calls_of(value, notation)


READERS: dict[str, Callable[[Context], CallReader]] = {
    "json": JsonCalls,
    "tags": TagCalls,
    "python": PythonCalls,
    "whole": WholeCalls,
}
