"""Incremental repair of the JSON that models write: emits valid JSON while the text arrives, in linear time.

    text of a model --JsonReader--> JSON text, and events: a key was read, its value is complete, all is complete

Valid JSON is not changed, white space included.  Other text is repaired, by one rule per common error of models:

- Python's single and triple quotes, bare keys and values, True, False, None and parentheses become JSON
- doubled braces, as in a format string of Python, count once
- arguments of a call in Python syntax that have no name get the names in `positions`, in order
- line ends and other control characters in strings, unknown escapes, and quotes inside a string are escaped
- a lone surrogate becomes U+FFFD
- an object or a list nested deeper than DEPTH becomes a string with its text
- extra or missing commas and missing or wrong closing brackets are corrected; a missing value becomes null

Text is `BAD` if it does not begin with a value.  While `strict`, it is also `BAD` if a key has no colon or no value, or
if anything but a comma, a quote or a bracket follows a value.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

import msgspec

from quire.service.output.deep_values import READ_TOGETHER, DeepValue
from quire.service.output.json_escapes import ends_string, unescape
from quire.service.output.markers import Markers

DEPTH = 256  # maximum nesting of objects and lists; JSON parsers of clients accept 500 or more
RUN = 256  # maximum characters of a bare word per step
_NO_KEY = re.compile(r"[{\[\"']")  # characters that no bare key contains
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
TRIPLE = (('"""', '"""'), ("'''", "'''"))  # Python's quotes of strings with line ends; escapes stay as they are
_QUOTED_KEY = re.compile(r"""["'](?:\w{1,128}(?:["']\s*(?P<colon>[:=])?)?)?""")
_UNNAMED = "\"'{[(-0123456789"  # characters that begin an argument without a name
_CLOSERS = {"{": "}", "[": "]", "(": "]", "call": "}"}


class Event(Enum):
    """Reason why `JsonReader.read` returned."""

    MORE = auto()  # more text is needed
    KEY = auto()  # a key at the watched depth was read, with its colon
    VALUE = auto()  # a value at the watched depth is complete
    END = auto()  # the object or list is complete
    STOP = auto()  # a marker stands at this position, outside of strings
    BAD = auto()  # the text cannot be repaired


class Dialect(msgspec.Struct, frozen=True):
    """Additions of a model family to JSON."""

    quotes: tuple[tuple[str, str], ...] = ()  # (opening, closing) marks of strings without escapes

    def mark(self, text: str, at: int, *, final: bool) -> str | None:
        """Return the opening mark at a position; "" if further text is needed to decide; None if there is none."""
        for mark, _ in (*self.quotes, *TRIPLE):
            if text.startswith(mark, at):
                return mark
            if not final and mark.startswith(text[at : at + len(mark)]):
                return ""
        return None


class _State(Enum):
    VALUE = auto()
    KEY = auto()
    COLON = auto()
    AFTER = auto()  # after a value: a comma or a closing bracket should follow
    STRING = auto()
    WORD = auto()
    DEEP = auto()


class JsonReader:
    """Reads one object or list."""

    __slots__ = (
        "_deep", "_dialect", "_doubled", "_gap", "_is_key", "_key", "_out", "_owed", "_positions", "_quote", "_spaced",
        "_stack", "_state", "_stop", "_word", "key", "loosens", "pairs", "strict", "watch", "words",
    )  # fmt: skip

    def __init__(self, dialect: Dialect | None = None, stop: Markers | None = None, *, watch: int = 0) -> None:
        """Create a reader that expects an object or a list.

        stop   markers that end reading, outside of strings
        watch  depth of the objects whose keys and values cause events; 0: no such events"""
        self._dialect, self._stop, self.watch = dialect or Dialect(), stop, watch
        self._out: list[str] = []
        self._stack: list[str] = []
        self._state = _State.VALUE
        self._gap = ""  # a comma and white space after it, held back until a value follows
        self._quote = ""  # the quote or mark that ends the open string
        self._deep = DeepValue()  # the open value that is nested too deep
        self._is_key = False  # the open string or word is a key
        self._word: list[str] = []  # text of the open bare word
        self._spaced = False  # the open word contains a space
        self._doubled: list[int] = []  # depths of the open objects whose opening brace was doubled
        self._owed = False  # the object that was just closed has a doubled brace, so another closing one may follow
        self._positions: list[str] = []  # names of the arguments that have no name, for a call in Python syntax
        self._key: list[str] = []  # text of the open or last key
        self.key = ""  # last key of the watched object
        self.pairs = 0  # number of colons read
        self.words = 0  # number of bare values read
        self.strict = True  # more kinds of text are BAD: see the module's docstring
        self.loosens = False  # the next colon within the watched object sets `strict` to False

    @property
    def depth(self) -> int:
        """Number of open objects and lists."""
        return len(self._stack)

    @property
    def is_between(self) -> bool:
        """Whether the position is after a complete value."""
        return self._state is _State.AFTER

    @property
    def in_key(self) -> bool:
        """Whether the position is within a key, or between a key and its value."""
        return self._state is _State.COLON or (self._is_key and self._state in (_State.STRING, _State.WORD))

    def begin_call(self, positions: list[str] | None = None) -> None:
        """Expect the arguments of a call in Python syntax, from after its opening parenthesis.

        `positions`: names of the function's arguments, for arguments without a name."""
        self._positions = list(positions or ())
        self._stack.append("call")
        self._out.append("{")
        self._state = _State.KEY

    def take(self) -> str:
        """Return the JSON text that was emitted since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def read(self, text: str, at: int, *, final: bool = False) -> tuple[int, Event]:
        """Read text from position `at` on.  Returns the position up to which it was read, and the event there.

        After MORE, the caller passes the unread characters again, with more text.  `final`: no more text comes."""
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
                self._begin_string(dict((*self._dialect.quotes, *TRIPLE))[mark])
                at, event = at + len(mark), None
            else:
                unnamed = self._state is _State.KEY and _begins_unnamed(self, text[at])
                at, event = _begin_unnamed(self, text, at, final) if unnamed else steps[self._state](text, at)
            if event is not None:
                return at, event
        return at, Event.MORE

    def flush(self) -> None:
        """Emit the open bare word of a text that was cut.  Open objects stay incomplete."""
        if self._state is _State.WORD:
            self._end_word()

    def complete(self, depth: int = 0) -> None:
        """Close all open strings, objects and lists down to `depth`, since no more text comes."""
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
        if char == "{" and self._stack[-1] == "{" and not self._gap and len(self._stack) not in self._doubled:
            self._doubled.append(len(self._stack))
            return at + 1, None
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
        if len(self._stack) == 1:
            self._positions.clear()  # as in Python, none without a name follows a named argument
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
        owed, self._owed = self._owed, False
        if owed and char == "}":
            return at + 1, None
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
        """Close the innermost open bracket that fits `char`, and all brackets within it.

        Does nothing if no open bracket fits."""
        wanted = {"}": ("{",), "]": ("[",), ")": ("(", "call")}[char]
        if not any(one in self._stack for one in wanted):
            return None
        self._out.append(self._gap[1:])
        self._gap = ""
        while True:
            kind = self._stack.pop()
            self._out.append(_CLOSERS[kind])
            self._owed = len(self._stack) + 1 in self._doubled
            if self._owed:
                self._doubled.remove(len(self._stack) + 1)
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
        """Read a string without escapes."""
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
        """Read a bare (unquoted) key or value up to its end."""
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


def _begins_unnamed(reader: JsonReader, char: str) -> bool:
    return bool(reader._positions) and char in _UNNAMED and reader._stack[-1] == "call"


def _begin_unnamed(reader: JsonReader, text: str, at: int, final: bool) -> tuple[int, Event | None]:
    """Begin an argument of a call in Python syntax: one without a name, unless a key in quotes follows."""
    if quoted := _QUOTED_KEY.match(text, at):
        if quoted.end() == len(text) and not final and not quoted["colon"]:
            return at, Event.MORE
        if quoted["colon"]:
            return reader._begin_key(text, at)
    reader._flush()
    reader._out.append(f"{json.dumps(reader._positions.pop(0), ensure_ascii=False)}: ")
    reader.pairs += 1
    reader.strict = reader.strict and not reader.loosens
    reader._state = _State.VALUE
    return at, None


def _write_spaces(reader: JsonReader, spaces: str) -> None:
    if reader._gap:
        reader._gap += spaces
    elif reader._stack:
        reader._out.append(spaces)


def _json_word(word: str) -> str | None:
    """Return the JSON of a bare word that is a number or a literal such as None; None for any other word."""
    if _NUMBER.fullmatch(word):
        return word
    return _LITERALS.get(word)
