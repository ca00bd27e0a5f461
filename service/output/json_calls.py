"""Incremental reader of tool calls in JSON."""

from __future__ import annotations

import json
import re

from quire.service.output.calls import (
    BESIDE,
    NO_ITEMS,
    TEXT,
    CallPart,
    Context,
    End,
    Status,
    arguments_of,
    calls_of,
    is_id,
    string_of,
)
from quire.service.output.lenient_json import Event, JsonReader
from quire.service.output.notations import CALLS, OTHER_ARGUMENTS, OTHER_NAMES

_BEFORE_KEY = " \t\r\n{,;"  # characters that may stand before a key of an object
_OBJECT = re.compile(r'"(?:\s|\\n)*\{')  # beginning of a string with an object in it
_IN_STRING = re.compile(r'"|\\.|\\\Z', re.DOTALL)
_NOTHING = re.compile(r"\s*(\{\s*\}|\[\s*\]|null|\"\s*\")?\s*")  # empty arguments


class JsonCalls:
    """Reads calls in JSON."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context, self._notation = context, context.notation
        self._value: _JsonCall | _JsonList | _JsonText | None = None  # the value that is being read
        self._fence = False  # the reader is within the word after the backticks of a code fence
        self._first = True  # no value was begun
        self._waiting: list[CallPart] = []  # parts of complete calls, until a closing marker or the end confirms them
        self._rest = False  # the call was emitted, and the members after its arguments are being read
        self._blank = True  # the text of these members is only white space so far

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """See `CallReader.read`."""
        while True:
            if self._value is None:
                at, status = self._between(text, at, end)
                if status is not None:
                    return at, status
            at, event = self._value_read(text, at, end)
            if event is not None:
                return at, event

    def _between(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        """Skip the text before a value.  Begins the value and returns None, or returns a status."""
        while at < len(text):
            match, pending = self._context.ends.at(text, at, final=bool(end))
            if pending:
                return at, Status.MORE
            if match is not None and self._first and not self._context.name and match.marker.field is self._notation:
                at = match.found.end()  # the model repeated the opening marker
                continue
            if match is not None and match.marker.kind in ("close", "call"):
                closes = match.marker.kind == "close"
                return match.found.end() if closes else at, self._end(end, closed=closes)
            if not self._is_junk(text[at]):
                break
            at += 1
        else:
            return at, Status.MORE if not end else self._end(end, closed=False)
        named = bool(self._context.name) and not self._notation.inner
        again = not self._first and not named and (self._context.parallel or self._notation.bare == "closed")
        if text[at] in "{[" and (self._first or again):
            return self._begin(text, at)
        if named and self._first and text[at] == '"':
            if not end and not text[at + 1 :].strip():
                return at, Status.MORE
            if _OBJECT.match(text, at):
                return self._begin(text, at)
        if self._first or self._notation.bare == "closed":
            return at, Status.BROKEN
        return at, Status.DONE

    def _begin(self, text: str, at: int) -> tuple[int, Status | None]:
        first, self._first = self._first, False
        named = bool(self._context.name) and not self._notation.inner
        whole = (text[at] == "[" and not named) or self._notation.keyed
        kind = _JsonText if text[at] == '"' else _JsonList if whole else _JsonCall
        self._value = kind(self._context)
        if first or self._notation.bare == "closed":
            return at, None
        self.committed = False
        return at, Status.NEXT

    def _is_junk(self, char: str) -> bool:
        """Return whether a character between values is skipped: white space, code fences, brackets and commas."""
        if char == "`":
            self._fence = True
        elif char.isspace():
            self._fence = False
        else:
            again = not self._first and char in ",;}])"
            return again or (self._fence and char.isalpha() and (self._first or self._notation.bare == "closed"))
        return True

    def _end(self, end: End, *, closed: bool) -> Status:
        """End the calls at a marker or at the end of the answer."""
        if self._first:
            closed = closed or (end == "whole" and self._context.name in self._context.tools)
            if not (closed and self._context.name):
                return Status.BROKEN
            self.parts.append((self._context.name, "{}"))
        self.parts += self._waiting
        self._waiting = []
        return Status.DONE

    def _value_read(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        """Continue to read the open value.  Returns the position and a status; None if the value is complete."""
        value, before = self._value, at
        assert value is not None
        at, event = value.read(text, at, end)
        self._blank = self._blank and not text[before:at].strip()
        if self._notation.bare != "closed":
            self.parts += value.parts
            self.committed = self.committed or (value.committed and not self._rest)
            value.parts = []
        if event is Event.VALUE:  # the arguments are complete and were emitted
            self.committed, self._rest, self._blank = False, True, True
            return at, Status.NEXT
        if event is Event.MORE and not end:
            return at, Status.MORE
        rest, self._rest, self._value = self._rest, False, None
        if rest:
            done = event is Event.END or self._blank or (event is not Event.BAD and value.is_closing)
            if done and isinstance(value, _JsonCall):
                self.parts += value.take_beside()
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
        self._notation, self._tools, self._parallel = context.notation, context.tools, context.parallel
        self._named = bool(context.name) and not context.notation.inner
        self._json = JsonReader(context.notation.dialect, context.ends, watch=0 if self._named else 1)
        self._name = context.name
        self._slot = "arguments" if self._named else ""  # role of the open member: name, arguments, function, other
        self._json.loosens = self._named
        self._collected: list[str] = []  # JSON of the open member, if it is the name or the function
        self._arguments: list[str] = []  # JSON of the arguments that was not emitted yet
        self._complete = False  # the arguments were read to their end
        self._filled = False  # the complete arguments are more than an empty object
        self._is_rest = False  # the arguments were emitted; the object's other members follow
        self._pairs = self._words = 0  # number of colons before the arguments, and of bare values before the name
        self._extra = False  # the object has keys that do not belong to a call
        self._member: list[str] = []  # text since the last value, unless a member of the call is open
        self._calls: list[CallPart] = []  # calls of the member `tool_calls`
        self._keyed: tuple[str, str] | None = None  # member whose key is the name of a function, and its JSON
        self._beside: list[str] = []  # members that do not belong to a call, as the model wrote them

    def read(self, text: str, at: int, end: End) -> tuple[int, Event]:
        """Continue to read, up to the end of the object."""
        while True:
            before = at
            at, event = self._json.read(text, at, final=bool(end))
            piece = self._json.take()
            if self._slot in ("", "other"):
                self._member.append(text[before:at])
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

    def take_beside(self) -> list[CallPart]:
        """Return the members that do not belong to the call, as content."""
        members, self._beside = self._beside, []
        if self._keyed is not None and self._name:
            members.insert(0, _member(*self._keyed))
            self._keyed = None
        return [(TEXT, ", ".join(members))] if members else []

    def end(self, event: Event, end: End) -> bool:
        """End the object.  Returns whether it is a call.  `event`: the event that ended reading."""
        if self._json.in_key and not self.committed:
            return False
        if event is not Event.END and end != "cut":
            self._json.complete(self._json.watch)
            self._collect(self._json.take())
        elif self.committed and event is not Event.END:
            self._json.flush()
            self._collect(self._json.take())
        if self.committed:
            return True
        if event is not Event.END and not self._complete and not self._calls:
            return False
        if self._calls and not self._extra:
            self.parts += self._calls if self._parallel else self._calls[:1]
            self.committed = True
            return True
        if not self._name:
            return self._commit_keyed()
        arguments = arguments_of("".join(self._arguments))
        if arguments is None or (self._extra and _NOTHING.fullmatch(arguments)):  # arguments are under an unknown key
            return False
        if not arguments:
            if self._extra or self._notation.bare:
                return False
            arguments = "{}"
        self._commit(arguments)
        return self.committed

    def _commit_keyed(self) -> bool:
        """Emit the call if the key of the object's only member is a function's name.  Returns whether it is."""
        if self._keyed is None or self._beside or self._arguments:
            return False
        (name, value), self._keyed = self._keyed, None
        if (arguments := arguments_of(value)) is not None:
            self._name = name
            self._commit(arguments or "{}")
        return self.committed

    def _begin_slot(self, key: str) -> None:
        self._collected = []
        if key == "function" and self._json.watch == 1 and not self._name:
            self._slot, self._json.watch, self._words = "function", 2, self._json.words
        elif key == CALLS and not self._extra and not self._name and not self._arguments:
            self._slot = "calls"
        elif key in self._notation.names and not self._name:
            self._slot, self._words = "name", self._json.words
        elif key in self._notation.arguments and not self.committed and not self._filled:
            self._slot, self._arguments, self._complete = "arguments", [], False
            self._pairs = self._json.pairs
            self._json.loosens = bool(self._name) and self._notation.bare != "closed"
        else:
            self._slot = "keyed" if key in self._tools and not self._name and not self._notation.bare else "other"
            self._extra = self._extra or key not in BESIDE
        if self._slot != "other":
            self._member = []

    def _collect(self, piece: str) -> None:
        if not piece:
            return
        if self._slot in ("name", "function", "keyed", "calls"):
            self._collected.append(piece)
        elif self._slot == "arguments" and not self._complete:
            if self.committed:
                self.parts.append((None, piece))
                return
            if piece := piece if self._arguments else piece.lstrip():
                self._arguments.append(piece)
            self._try_commit()

    def _try_commit(self) -> None:
        """Emit the call once its name and the key of its first argument are known."""
        known = self._filled if self._complete else self._json.pairs > self._pairs
        if not self._name or not known or self._notation.bare == "closed":
            return
        if self._arguments and self._arguments[0].startswith("{"):
            self._commit("".join(self._arguments))

    def _commit(self, arguments: str) -> None:
        if self._notation.bare and self._tools and self._name not in self._tools:
            return
        self.committed = True
        self.parts += [*self.take_beside(), (self._name, arguments.lstrip())]

    def _end_slot(self) -> bool:
        """End a member of the object.  Returns False if the object cannot be a call because of this member."""
        slot, self._slot = self._slot, ""
        member, self._member = "".join(self._member), []
        if slot == "other" and not is_id(member := member.lstrip(_BEFORE_KEY)):
            self._beside.append(member)
        if self._json.depth == 1:
            self._json.watch = 1
        if slot in ("calls", "keyed"):
            return self._end_key(slot, "".join(self._collected))
        if slot == "arguments" and self._json.key in OTHER_ARGUMENTS and not arguments_of("".join(self._arguments)):
            self._keep_beside("".join(self._arguments))
            self._arguments = []
        elif slot == "arguments":
            self._complete, self._json.strict, self._json.loosens = True, True, False
            self._filled = _NOTHING.fullmatch("".join(self._arguments)) is None
        elif slot in ("name", "function"):
            value = string_of("".join(self._collected))
            if value is not None and (self._json.words == self._words or value.strip() in self._tools):
                self._name = value.strip()
                if not self._name or (self._notation.bare and self._tools and self._name not in self._tools):
                    return False
                self._try_commit()
            elif slot == "name" and self._json.key in OTHER_NAMES:
                self._keep_beside("".join(self._collected))
            elif slot == "name":
                return False
        return True

    def _end_key(self, slot: str, text: str) -> bool:
        """End the member `tool_calls`, or one whose key is the name of a function; see `_end_slot`."""
        if slot == "keyed" and self._keyed is None:
            self._keyed = (self._json.key, text)
            return True
        calls = calls_of(text, self._notation) if slot == "calls" and text.lstrip().startswith("[") else None
        if calls and not (self._tools and any((name or "") not in self._tools for name, _ in calls)):
            self._calls = calls
            return True
        self._keep_beside(text)
        return not self._notation.bare

    def _keep_beside(self, value: str) -> None:
        """Keep the member that was just read, since it turned out not to belong to the call."""
        self._extra = True
        self._beside.append(_member(self._json.key, value))


def _member(key: str, value: str) -> str:
    return f"{json.dumps(key, ensure_ascii=False)}: {value.strip()}"


class _JsonText:
    """Reads arguments that are a string with a JSON object in it, after a marker with the name."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self.is_closing = False
        self._context = context
        self._text: list[str] = []

    def read(self, text: str, at: int, end: End) -> tuple[int, Event]:
        """Continue to read, up to the quote that ends the string."""
        begin, at = at, at if self._text else at + 1
        event = Event.MORE
        while event is Event.MORE and (found := _IN_STRING.search(text, at)) is not None:
            if found[0] == "\\":  # the character that it escapes has not arrived yet
                at = found.start()
                break
            at, event = found.end(), Event.END if found[0] == '"' else event
        else:
            at = len(text) if event is Event.MORE else at
        self._text.append(text[begin:at])
        return at, event

    def end(self, event: Event, end: End) -> bool:
        """End the string.  Returns whether it contains an object."""
        name = self._context.name
        arguments = arguments_of("".join(self._text)) if event is Event.END else None
        if not arguments or (self._context.notation.bare and name not in self._context.tools):
            return False
        self.parts.append((name, arguments))
        self.committed = True
        return True


class _JsonList:
    """Reads a list of calls, which is emitted only once it is complete."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context = context
        self._json = JsonReader(context.notation.dialect, context.ends)
        self._text: list[str] = []

    def read(self, text: str, at: int, end: End) -> tuple[int, Event]:
        """Continue to read, up to the end of the list."""
        at, event = self._json.read(text, at, final=bool(end))
        self._text.append(self._json.take())
        return at, event

    @property
    def is_closing(self) -> bool:
        """Whether nothing but a closing bracket is missing."""
        return self._json.is_between and self._json.depth == 1

    def end(self, event: Event, end: End) -> bool:
        """End the list.  Returns whether it contains only calls."""
        if event is not Event.END:
            if end == "cut" or not self.is_closing:
                return False
            self._json.complete()
            self._text.append(self._json.take())
        context, text = self._context, "".join(self._text)
        if NO_ITEMS.fullmatch(text.strip()) and not context.notation.bare:  # some models write [] if they call no tool
            return True
        calls = calls_of(text, context.notation)
        if calls is None:
            return False
        if context.notation.bare and context.tools and any(name not in context.tools for name, _ in calls if name):
            return False
        self.parts += calls if context.parallel else calls[:1]
        self.committed = True
        return True
