"""Reader of tool calls whose arguments stand between tags."""

from __future__ import annotations

import json

from quire.service.output.argument_types import NO_STRING, ArgumentText
from quire.service.output.calls import Context, End, Status
from quire.service.output.json_calls import JsonCalls
from quire.service.output.json_strings import JsonStrings
from quire.service.output.markers import Match
from quire.service.output.stepped_calls import SteppedCalls

STREAM_CHARS = 256  # a string argument longer than this is streamed; a shorter one is emitted once complete


class TagCalls(SteppedCalls):
    """Reads the arguments of one call, each between tags of its own."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._name = context.name
        self._written: list[str] = []  # JSON of complete arguments that were not emitted yet
        self._keys = set[str]()
        self._pairs = 0  # number of arguments begun; differs from len(_keys) if a key is repeated
        self._key: str | None = None  # name of the open argument
        self._is_text = False  # the open argument is a string, whatever its text looks like
        self._value = ArgumentText([])
        self._streams = False  # the open argument is emitted while the model writes it
        self._strings: JsonStrings | None = None  # set while the open argument may be an object or a list
        self._follows = True  # markers within strings of JSON count as text
        self._marker: int | None = None  # offset, from the reader's position, of the first marker in a JSON string
        self._searched = 0  # characters, from the reader's position, in which no end of the value was found

    def _step(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        return self._between(text, at, end) if self._key is None else self._argument(text, at, end)

    def _between(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        """Read the text between arguments."""
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
            self._open(key, match)
            return match.found.end(), None
        if match is not None and kind == "junk":
            return match.found.end(), None
        if match is not None and kind in ("close", "call"):
            return match.found.end() if kind == "close" else at, self._finish()
        return at, self._finish() if self.committed else Status.BROKEN

    def _open(self, key: str, match: Match) -> None:
        tools = self._context.tools
        written = (match.found.groupdict().get("string") or "").lower()  # attribute `string` of the tag
        is_text = written in ("true", "string")
        types = tools.types(self._name, key) if not written else [] if is_text else NO_STRING
        self._is_text = is_text or (not written and tools.is_text(self._name, key))
        self._key, self._value, self._streams = key, ArgumentText(types), False
        self._keys.add(key)
        self._pairs += 1
        self._marker, self._searched = None, 0
        is_json = self._follows and not {"object", "array"}.isdisjoint(types)
        self._strings = JsonStrings() if is_json else None

    def _argument(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        """Read the value of the open argument."""
        match, upto, after = self._value_end(text, at, end)
        if self._marker is not None:
            if match is None and not end:  # wait at the marker: it is text only if complete JSON follows
                self._grow(text[at : at + self._marker])
                at += self._marker
                self._marker, self._searched = 0, upto - at
                return at, Status.MORE
            if match is None or not _is_json(self._value.text + text[at:upto]):
                self._follows = False  # this happens once per call at most, so no text is read more than twice
                self._strings, self._marker, self._searched = None, None, 0
                return self._argument(text, at, end)
        self._searched = 0
        self._grow(text[at:upto])
        if match is not None:
            self._close()
            return after if match.marker.kind == "closes" else upto, None
        if not end:
            return upto, Status.MORE
        if not self.committed:
            return upto, Status.BROKEN
        if end == "whole":
            self._close()
        elif not self._streams:
            begun = json.dumps(self._value.text, ensure_ascii=False)[:-1]
            self._written.append(f", {json.dumps(self._key, ensure_ascii=False)}: {begun}")
        return upto, self._finish(cut=end == "cut")

    def _value_end(self, text: str, at: int, end: End) -> tuple[Match | None, int, int]:
        """Return the marker that ends the value, the marker's position, and its end.

        Without a marker, the position is the end of the searched text, which has none. A marker within a JSON string is
        text; the position of the first such marker is stored in `_marker`."""
        place = at + self._searched
        skipped = place - 1 if self._searched else 0  # avoids searching text again after waiting for more
        window = text[skipped:] if skipped else text
        while True:
            match, upto = self._context.value_ends.next(window, place - skipped, final=bool(end))
            upto += skipped
            if self._strings is not None:
                self._strings.follow(text[place:upto])
            if match is None:
                return None, upto, upto
            if match.marker.kind != "argument" or self._is_next(match):
                if self._strings is None or not self._strings.inside:
                    return match, upto, match.found.end() + skipped
                self._marker = upto - at if self._marker is None else self._marker
            if self._strings is not None:
                self._strings.follow(text[upto])
            place = upto + 1

    def _is_next(self, match: Match) -> bool:
        """Return whether an opening tag within a value begins the next argument, rather than being text."""
        tools, key = self._context.tools, match.found["key"].strip()
        return key not in self._keys and (not tools or tools.takes(self._name, key))

    def _grow(self, text: str) -> None:
        if not text:
            return
        if self._streams:
            self.parts.append((None, json.dumps(text, ensure_ascii=False)[1:-1]))
            return
        value = self._value
        value.push(text)
        if self._is_text and value.chars > STREAM_CHARS and not value.begin.startswith("<![CDATA["):
            self._pass_on()
            comma = ", " if self._pairs > 1 else ""
            begun = json.dumps(value.text, ensure_ascii=False)[:-1]
            self.parts.append((None, f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {begun}"))
            self._streams = True

    def _close(self) -> None:
        """End the open argument."""
        key, self._key = self._key, None
        assert key is not None
        if self._streams:
            self.parts.append((None, '"'))
            return
        comma = ", " if self._pairs > 1 else ""
        self._written.append(f"{comma}{json.dumps(key, ensure_ascii=False)}: {self._value.value()}")
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


def _is_json(text: str) -> bool:
    """Return whether a text is JSON; line ends within strings are allowed."""
    try:
        json.loads(text, strict=False, parse_int=float)  # Python refuses to parse an int of more than 4,300 digits
    except (ValueError, RecursionError):
        return False
    return True
