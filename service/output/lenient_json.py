"""JSON as models write it: read as it arrives, written on as valid JSON, in linear time.

    text of a model --JsonReader--> JSON text, and events: a key was read, its value is complete, all is complete

Valid JSON passes as it is, spaces included.  Everything else is repaired by rule, one rule for each habit of models:

- single quotes, bare keys and values, True, False, None, parentheses: as in Python, written as JSON
- line ends and other control characters in strings, unknown escapes, quotes inside a string: escaped
- half a surrogate pair: U+FFFD
- an object or a list within DEPTH others: its text, as a string
- commas too many or missing, a missing value (null), missing or wrong closing brackets: as if they were right

Some text is `BAD`: what does not begin like a value, and, while `strict`, a key without a colon or a value, and
anything but a comma, a quote or a bracket after a value.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

import msgspec

from quire.service.output.deep_values import READ_TOGETHER, DeepValue
from quire.service.output.json_escapes import ends_string, unescape
from quire.service.output.markers import Markers

DEPTH = 256  # nested objects and lists: parsers of clients read 500 and more
RUN = 256  # characters of a bare word that are looked at together
_NO_KEY = re.compile(r"[{\[\"']")  # text between values, not a bare key
_SPACES = re.compile(r"[ \t\r\n]+")
_ODD_SPACES = re.compile(r"[^\S \t\r\n]+")
_RUN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_VALUE_WORD = re.compile(r"[^\s,\]})<]+")
_KEY_WORD = re.compile(r"[^\s,\]})<:=]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LITERALS = {
    "true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null",
    "NaN": "null", "Infinity": "null", "-Infinity": "null", "undefined": "null",
}  # fmt: skip
_CLOSERS = {"{": "}", "[": "]", "(": "]", "call": "}"}


class Event(Enum):
    """Why `JsonReader.read` returned."""

    MORE = auto()  # it needs more text
    KEY = auto()  # a key of an object at the watched depth, and its colon
    VALUE = auto()  # a value at the watched depth is complete
    END = auto()  # all is complete
    STOP = auto()  # a marker stands here, outside of strings
    BAD = auto()  # this cannot be read


class Dialect(msgspec.Struct, frozen=True):
    """How a family's JSON differs."""

    quotes: tuple[tuple[str, str], ...] = ()  # further marks around strings, in which nothing is escaped

    def mark(self, text: str, at: int, *, final: bool) -> str | None:
        """Return the mark that begins a string here; "": more text decides; None: there is none."""
        for mark, _ in self.quotes:
            if text.startswith(mark, at):
                return mark
            if not final and mark.startswith(text[at : at + len(mark)]):
                return ""
        return None


class _State(Enum):
    VALUE = auto()
    KEY = auto()
    COLON = auto()
    AFTER = auto()  # a value: a comma or a closing bracket follows
    STRING = auto()
    WORD = auto()
    DEEP = auto()


class JsonReader:
    """Reads one object or list."""

    __slots__ = (
        "_deep", "_dialect", "_gap", "_is_key", "_key", "_out", "_quote", "_spaced", "_stack", "_state", "_stop",
        "_word", "key", "loosens", "pairs", "strict", "watch", "words",
    )  # fmt: skip

    def __init__(self, dialect: Dialect | None = None, stop: Markers | None = None, *, watch: int = 0) -> None:
        """Begin with an object or a list.

        stop   markers that end the text outside of strings
        watch  depth of the object whose keys and values are events; 0: none"""
        self._dialect, self._stop, self.watch = dialect or Dialect(), stop, watch
        self._out: list[str] = []
        self._stack: list[str] = []
        self._state = _State.VALUE
        self._gap = ""  # a comma and the spaces after it, until a value follows
        self._quote = ""  # what ends the open string
        self._deep = DeepValue()  # the open one
        self._is_key = False  # the open string or word is a key
        self._word: list[str] = []
        self._spaced = False  # there is a space in it
        self._key: list[str] = []
        self.key = ""  # last key read of the watched object
        self.pairs = 0  # colons read
        self.words = 0  # bare values read
        self.strict = True  # text may still be bad
        self.loosens = False  # with the next colon within the watched object it may no longer be

    @property
    def depth(self) -> int:
        """Objects and lists that are open."""
        return len(self._stack)

    @property
    def is_between(self) -> bool:
        """Whether no value is open but objects and lists."""
        return self._state is _State.AFTER

    @property
    def in_key(self) -> bool:
        """Whether a key was begun whose value was not."""
        return self._state is _State.COLON or (self._is_key and self._state in (_State.STRING, _State.WORD))

    def begin_call(self) -> None:
        """Begin with the arguments of a call in Python's notation, after its parenthesis."""
        self._stack.append("call")
        self._out.append("{")
        self._state = _State.KEY

    def take(self) -> str:
        """Return the JSON text that is new."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def read(self, text: str, at: int, *, final: bool = False) -> tuple[int, Event]:
        """Read on from a position; return the position up to which all was read, and why it ends there.

        The rest, a few characters, is given again with more text.  `final`: no more text comes."""
        steps = {_State.VALUE: self._value, _State.KEY: self._begin_key, _State.COLON: self._colon}
        while at < len(text):
            if self._state is _State.STRING:
                at, event = self._string(text, at, final)
            elif self._state is _State.DEEP:
                at, event = self._read_deep(text, at, final)
            elif self._state is not _State.WORD and (spaces := _SPACES.match(text, at)):
                _write_spaces(self, spaces[0])
                at, event = spaces.end(), None
            elif self._state is not _State.WORD and (spaces := _ODD_SPACES.match(text, at)):
                at, event = spaces.end(), None
            elif (event := self._stopped(text, at, final)) is not None:
                return at, event
            elif self._state is _State.WORD:
                at, event = self._read_word(text, at)
            elif self._state is _State.AFTER:
                at, event = self._after(text, at)
            elif (mark := self._dialect.mark(text, at, final=final)) is not None:
                if not mark:
                    return at, Event.MORE
                self._begin_string(dict(self._dialect.quotes)[mark])
                at, event = at + len(mark), None
            else:
                at, event = steps[self._state](text, at)
            if event is not None:
                return at, event
        return at, Event.MORE

    def flush(self) -> None:
        """Write the open word as far as it was read: no more text comes, and the value stays incomplete."""
        if self._state is _State.WORD:
            self._end_word()

    def complete(self, depth: int = 0) -> None:
        """Close what is open, down to a depth: no more text comes."""
        if self._state in (_State.STRING, _State.DEEP):
            self._end_string()
        elif self._state is _State.WORD:
            self._end_word()
        if self._state is _State.COLON:
            self._out.append(": null")
        elif self._state is _State.VALUE and self._stack and self._stack[-1] in ("{", "call") and not self._gap:
            self._out.append("null")
        while len(self._stack) > depth:
            self._out.append(_CLOSERS[self._stack.pop()])

    def _stopped(self, text: str, at: int, final: bool) -> Event | None:
        if self._stop is None or not self._stop.may_begin_in(text[at]):
            return None
        match, pending = self._stop.at(text, at, final=final)
        return Event.STOP if match is not None else Event.MORE if pending else None

    def _flush(self) -> None:
        if self._gap:
            self._out.append(self._gap)
            self._gap = ""

    def _value(self, text: str, at: int) -> tuple[int, Event | None]:
        char = text[at]
        if not self._stack and char not in "{[":
            return at, Event.BAD
        if char in "{[(":
            self._flush()
            if len(self._stack) >= DEPTH:
                self._state, self._is_key, self._deep = _State.DEEP, False, DeepValue()
                self._out.append('"')
                return at, None
            self._stack.append(char)
            self._out.append("[" if char == "(" else char)
            self._state = _State.KEY if char == "{" else _State.VALUE
            return at + 1, None
        if char in "\"'":
            self._begin_string(char)
            return at + 1, None
        if char in ",}])":
            if self._stack[-1] in ("{", "call"):
                if self.strict:
                    return at, Event.BAD
                self._out.append("null")
                return at, self._end_value()
            if char == ",":
                return at + 1, None
            return at + 1, self._close(char)
        self._flush()
        self._state, self._is_key = _State.WORD, False
        if char == "<":
            self._word.append(char)
            at += 1
        return at, None

    def _begin_key(self, text: str, at: int) -> tuple[int, Event | None]:
        char = text[at]
        if char in "}])":
            return at + 1, self._close(char)
        if char == ",":
            return at + 1, None
        if char in ":={[(":
            if self.strict:
                return at, Event.BAD
            self._flush()
            self._out.append('""')
            self._key, self._state = [], _State.COLON
            return at, None
        self._flush()
        self._key, self._is_key = [], True
        if char in "\"'":
            self._begin_string(char)
            return at + 1, None
        self._state = _State.WORD
        if char == "<":
            self._word.append(char)
            at += 1
        return at, None

    def _colon(self, text: str, at: int) -> tuple[int, Event | None]:
        found = text[at] == ":" or text[at] == "="
        if not found and self.strict:
            return at, Event.BAD
        if not found and text[at] in ",}])":
            self._out.append(": null")
            return at, self._end_value()
        self._out.append(": " if text[at] == "=" else ":")
        self.pairs += 1
        if self.loosens and len(self._stack) > self.watch:
            self.strict = self.loosens = False
        self._state = _State.VALUE
        if self.watch and len(self._stack) == self.watch:
            try:
                self.key = str(json.loads('"' + "".join(self._key) + '"'))
            except ValueError:
                self.key = ""
            return at + found, Event.KEY
        return at + found, None

    def _after(self, text: str, at: int) -> tuple[int, Event | None]:
        char = text[at]
        if char in "}])":
            return at + 1, self._close(char)
        if char in ",;":
            self._gap = ","
            at += 1
        elif self.strict and char not in "\"'":
            return at, Event.BAD
        else:
            self._gap = self._gap or ","
        self._state = _State.VALUE if self._stack[-1] in "[(" else _State.KEY
        return at, None

    def _close(self, char: str) -> Event | None:
        """Close the innermost bracket that this one can close, and those within it.  Others are left out."""
        wanted = {"}": ("{",), "]": ("[",), ")": ("(", "call")}[char]
        if not any(one in self._stack for one in wanted):
            return None
        self._out.append(self._gap[1:])
        self._gap = ""
        while True:
            kind = self._stack.pop()
            self._out.append(_CLOSERS[kind])
            if kind in wanted:
                return self._end_value()

    def _end_value(self) -> Event | None:
        self._state = _State.AFTER
        if not self._stack:
            return Event.END
        return Event.VALUE if len(self._stack) <= self.watch else None

    def _begin_string(self, ends: str) -> None:
        if self._state is not _State.KEY:
            self._is_key = False
            self._flush()
        else:
            self._flush()
            self._key, self._is_key = [], True
        self._state, self._quote = _State.STRING, ends
        self._out.append('"')

    def _write(self, text: str) -> None:
        self._out.append(text)
        if self._is_key:
            self._key.append(text)

    def _end_string(self) -> Event | None:
        self._out.append('"')
        if self._is_key:
            self._state = _State.COLON
            return None
        return self._end_value()

    def _string(self, text: str, at: int, final: bool) -> tuple[int, Event | None]:
        quote = self._quote
        if len(quote) > 1:
            return self._raw_string(text, at, final)
        if run := _RUN[quote].match(text, at):
            self._write(run[0])
            return run.end(), None
        char = text[at]
        if char == "\\":
            if (escape := unescape(text, at, final=final)) is None:
                return at, Event.MORE
            self._write(escape[0])
            return escape[1], None
        if char == quote:
            ends = ends_string(text, at + 1, final=final, key=self._is_key, strict=self.strict)
            if ends is None:
                return at, Event.MORE
            if ends:
                return at + 1, self._end_string()
        self._write(json.dumps(char)[1:-1])
        return at + 1, None

    def _raw_string(self, text: str, at: int, final: bool) -> tuple[int, Event | None]:
        """Read a string in which nothing is escaped."""
        quote = self._quote
        end = text.find(quote, at)
        upto = end if end >= 0 else len(text)
        if end < 0 and not final:
            upto -= next((n for n in range(min(len(quote) - 1, upto - at), 0, -1) if text.endswith(quote[:n])), 0)
        if upto > at:
            self._write(json.dumps(text[at:upto], ensure_ascii=False)[1:-1])
        if end >= 0:
            return end + len(quote), self._end_string()
        return upto, Event.MORE

    def _read_deep(self, text: str, at: int, final: bool) -> tuple[int, Event | None]:
        upto = min(len(text), at + READ_TOGETHER)
        if self._stop is not None and not self._deep.quoted:
            if (event := self._stopped(text, at, final)) is not None:
                return at, event
            upto = self._stop.candidate(text, at + 1, upto)
        before = at
        written, at, ends = self._deep.read(text, at, upto, final=final)
        self._out.append(written)
        return at, self._end_string() if ends else Event.MORE if at == before else None

    def _read_word(self, text: str, at: int) -> tuple[int, Event | None]:
        """Read a bare key or value, up to what ends it."""
        char = text[at]
        if run := (_KEY_WORD if self._is_key else _VALUE_WORD).match(text, at, at + RUN):
            end = run.end() if self._stop is None else max(self._stop.candidate(text, at, run.end()), at + 1)
            if self._is_key and self.strict and (odd := _NO_KEY.search(text, at, end)):
                return odd.start(), Event.BAD
            self._word.append(text[at:end])
            return end, None
        ends = char in (",}])\n\r:=" if self._is_key else ",}])\n\r")
        if not ends and not self._is_key and char.isspace() and not self._spaced:
            ends = _json_word("".join(self._word)) is not None
        if ends:
            return at, self._end_word()
        self._spaced = self._spaced or char.isspace()
        self._word.append(char)
        return at + 1, None

    def _end_word(self) -> Event | None:
        word = "".join(self._word)
        self._word.clear()
        self._spaced = False
        bare = word.rstrip()
        quoted = json.dumps(bare, ensure_ascii=False)
        if self._is_key:
            self._out.append(quoted)
            self._key, self._state = [quoted[1:-1]], _State.COLON
            return None
        self.words += 1
        self._out.append((_json_word(bare) or quoted) + word[len(bare) :])
        return self._end_value()


def _write_spaces(reader: JsonReader, spaces: str) -> None:
    if reader._gap:
        reader._gap += spaces
    elif reader._stack:
        reader._out.append(spaces)


def _json_word(word: str) -> str | None:
    """Return a number or a literal as JSON writes it; None for anything else."""
    if _NUMBER.fullmatch(word):
        return word
    return _LITERALS.get(word)
