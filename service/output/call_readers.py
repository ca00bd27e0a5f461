"""Readers of tool calls, one per kind of notation: text of a call -> its name, and its arguments as valid JSON.

    opening marker --RegionReader--> reader of the notation --> parts of calls, and a Status

    json    {"name": ..., "arguments": {...}}, a list of such objects, or only arguments if the marker has the name
    tags    <parameter=city>Paris</parameter> ...
    python  [weather(city="Paris"), ...]
    nested  <near><item>3</item></near> ..., parsed once the call is complete
    whole   any other notation that transformers can parse, once the call is complete

A reader visits each character a bounded number of times.  It never emits arguments that are no JSON object, and never a
call without the arguments that the model wrote.  Text that it cannot read has status `BROKEN` and becomes content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.service.output.calls import CallReader, Context, End, Status
from quire.service.output.complete_calls import WholeCalls
from quire.service.output.json_calls import JsonCalls
from quire.service.output.lenient_json import Event, JsonReader
from quire.service.output.nested_calls import NestedCalls
from quire.service.output.stepped_calls import SteppedCalls
from quire.service.output.tag_calls import TagCalls


class PythonCalls(SteppedCalls):
    """Reads calls in Python syntax."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._reader: JsonReader | None = None  # reader of the open call's arguments
        self._name = ""
        self._first = True

    def _step(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        return self._between(text, at, end) if self._reader is None else self._arguments(text, at, end)

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
        if match is not None and self._first and match.marker.field is self._context.notation:
            return match.found.end(), None  # the model repeated the opening marker
        kind = match.marker.kind if match is not None else ""
        if match is not None and kind == "name" and (self._first or self._context.parallel):
            if not self._first and self.committed:
                self.committed = False
                return at, Status.NEXT
            self._first = False
            self._name, self._reader = match.found["name"], JsonReader(None, self._context.ends)
            positions = [*self._context.tools.outlines(self._context.tools.own_name(self._name))]
            self._reader.begin_call(positions)
            self._reader.loosens = True
            return self._unwrapped(match.found, positions), None
        if self._first:
            return at, Status.BROKEN
        return match.found.end() if match is not None and kind == "close" else at, Status.DONE

    def _unwrapped(self, found: Any, positions: list[str]) -> int:
        """Return where the arguments begin: after the brace of `f({"a": 1})`, unless an object is the first of them."""
        takes = self._context.tools.types(self._context.tools.own_name(self._name), positions[0]) if positions else []
        return int(found.start("object") if found["object"] == "{" and "object" in takes else found.end())

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


READERS: dict[str, Callable[[Context], CallReader]] = {
    "json": JsonCalls,
    "tags": TagCalls,
    "python": PythonCalls,
    "nested": NestedCalls,
    "whole": WholeCalls,
}
