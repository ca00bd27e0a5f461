"""Reader of tool calls whose arguments stand between tags."""

from __future__ import annotations

import json

from service.argument_types import NO_STRING, ArgumentText
from service.calls import CallPart, Context, End, Status
from service.json_calls import JsonCalls
from service.markers import Match

STREAM_CHARS = 256  # longest argument in tags that is held back: a longer string is passed on as it is written


class TagCalls:
    """Reads the arguments of one call, each between tags of its own."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context, self._name = context, context.name
        self._json: JsonCalls | None = None  # reads arguments that are JSON after all
        self._written: list[str] = []  # arguments that were not passed on yet
        self._keys = set[str]()
        self._key: str | None = None  # name of the open argument
        self._is_text = False  # it is a string, whatever its text is
        self._value = ArgumentText([])
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
        tools = self._context.tools
        written = (match.found.groupdict().get("string") or "").lower()  # the attribute of its tag
        types = tools.types(self._name, key) if not written else NO_STRING if written == "false" else []
        self._is_text = written == "true" or (not written and tools.is_text(self._name, key))
        self._key, self._value, self._streams = key, ArgumentText(types), False
        self._keys.add(key)

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
            begun = json.dumps(self._value.text, ensure_ascii=False)[:-1]
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
        value = self._value
        value.push(text)
        if self._is_text and value.chars > STREAM_CHARS and not value.begin.startswith("<![CDATA["):
            self._pass_on()
            comma = ", " if len(self._keys) > 1 else ""
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
        comma = ", " if len(self._keys) > 1 else ""
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
