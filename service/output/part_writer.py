"""Collects the parts of a chat answer, in the order in which the model wrote them, without white space next to markers.

    text, calls --PartWriter--> TextDelta (content or reasoning) | CallDelta

White space at the end of a text is held back, and dropped if a marker follows.  Brackets and commas after a call are
held back and dropped likewise.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from quire.service.output.argument_types import Tools
from quire.service.output.calls import TEXT, CallPart
from quire.service.output.notations import Field

BETWEEN_CALLS = re.compile(r"[\s,;\[\](){}]*")  # text between two calls that is dropped


class CallDelta(msgspec.Struct):
    """New text of one tool call.  `index` counts the calls of a choice; only a call's first delta has its name."""

    index: int
    name: str | None
    arguments: str  # next part of the arguments' JSON


class TextDelta(msgspec.Struct):
    """New text of the content or of the reasoning."""

    text: str
    reasoning: bool = False


Part = TextDelta | CallDelta


class PartWriter:
    """Writes the parts of one answer.  `RegionReader` finds the markers and sets the open region (`field`)."""

    __slots__ = (
        "_dropped", "_held", "_junk", "_keeps_text", "_new", "_open", "_strips_content", "_unsplit",
        "after_call", "after_marker", "blank_line", "calls", "empty", "field",
    )  # fmt: skip

    def __init__(self, *, keeps_text: bool, strips_content: bool, unsplit: Collection[str] = ()) -> None:
        """Write the parts of one choice.

        keeps_text      text outside of the marked regions (reasoning, calls) is content; else it is dropped
        strips_content  drop white space of the content next to markers
        unsplit         names of tools whose calls become one delta once they are complete"""
        self._unsplit = unsplit
        self._open = CallDelta(-1, None, "")  # open call that will become one delta; index -1: no such call
        self._keeps_text, self._strips_content = keeps_text, strips_content
        self.field: Field | None = None  # the open region; None: the content
        self.calls = 0  # number of calls
        # True until other text than white space (`after_call`: also brackets and commas) follows a marker or call.
        self.after_marker = self.after_call = False
        self._held: list[str] = []  # white space that is held back, since a marker may follow
        self._junk: list[str] = []  # brackets and commas after a call, held back
        self._dropped = ""  # white space that was dropped before the last marker
        self.empty = self.blank_line = True  # the answer, and its last line, have only white space so far
        self._new: list[Part] = []

    @property
    def reasoning(self) -> bool:
        """Whether the reasoning is open."""
        return self.field is not None and self.field.kind == "reasoning"

    @property
    def waiting_space(self) -> str:
        """White space at the end of the content that is held back, since a marker may follow."""
        return "".join(self._held) if self.field is None else ""

    def take(self) -> list[Part]:
        """Return the new parts since the last call.  Consecutive text of one region is one part."""
        found, self._new = self._new, []
        return found

    def start_answer(self) -> None:
        """Drop all parts so far, which come from the prompt: it may even contain an earlier message with calls."""
        self._held, self._junk, self.calls = [], [], 0
        self.take()

    def end(self, *, write_space: bool) -> None:
        """End the answer.  `write_space`: write the white space that is held back."""
        self._pass_open()
        if write_space:
            self.append("".join(self._held))
        self._held, self._junk, self.field = [], [], None

    # -- markers

    def pass_marker(self, *, opens: bool) -> None:
        """Drop the white space before a marker.  `opens`: the marker begins a region or a call."""
        junk = "".join(self._junk)
        self._dropped = "".join([junk.lstrip() if self.after_marker else junk, *self._held])
        self._held = []
        self.after_marker = self.blank_line = True
        if opens:
            self._junk, self.after_call = [], False

    def add_marker(self, text: str) -> None:
        """Write a marker as content, with the white space before it."""
        self.add_raw("".join(self._held) + text)
        self._held = []

    # -- calls

    def add_calls(self, parts: list[CallPart], tools: Tools) -> None:
        """Add new parts of calls, and text between calls.  `tools`: the tools of the request."""
        for name, arguments in parts:
            last = self._new[-1] if self._new else None
            if name is not None:
                self._pass_open()
            if name == TEXT:
                self.append(arguments)
            elif name is not None:
                call = CallDelta(self.calls, tools.own_name(name), arguments)
                self.calls += 1
                if call.name in self._unsplit:
                    self._open = call
                else:
                    self._new.append(call)
            elif self._open.name is not None:
                self._open.arguments += arguments
            elif isinstance(last, CallDelta):
                last.arguments += arguments
            elif arguments:
                self._new.append(CallDelta(self.calls - 1, None, arguments))

    def _pass_open(self) -> None:
        """Pass on the call that was held back until it is complete."""
        if self._open.name is not None:
            self._new.append(self._open)
            self._open = CallDelta(-1, None, "")

    def begin_next_call(self) -> None:
        """Begin a call that has no opening marker of its own, since it follows another call."""
        self._pass_open()
        self._dropped = ""

    def end_call(self) -> None:
        """End a call."""
        self._pass_open()
        self._dropped = ""
        self.after_call = self.after_marker = True
        self.empty = False

    def break_call(self, text: str, *, raw: bool) -> None:
        """Write the text of a call that cannot be read as content.  `raw`: with the white space before its marker."""
        if raw:
            self.add_raw(self._dropped + text)
        else:
            self.add_text(text)
        self._dropped, self.after_call = "", False

    def end_in_call(self) -> None:
        """Close the reasoning, since the answer ends with calls in the reasoning."""
        self._held, self.field = [], None

    # -- text

    def add_text(self, text: str) -> None:
        """Add text of the open region, or of the content."""
        if self.field is None:
            if not self._keeps_text:
                return
            if self.after_call:
                if BETWEEN_CALLS.fullmatch(text):
                    self._junk.append(text)
                    return
                text, self._junk, self.after_call = "".join([*self._junk, text]), [], False
        line = text[text.rfind("\n") + 1 :]
        self.blank_line = not line.strip() and (self.blank_line or len(line) < len(text))
        if self.after_marker and self._strips():
            text = text.lstrip()
            if not text:
                return
        self.empty = self.empty and not text.strip()
        self.after_marker = False
        if self._strips():
            bare = text.rstrip()
            held, spaces = self._held, text[len(bare) :]
            if not bare:
                held.append(spaces)
                return
            text, self._held = "".join([*held, bare]), [spaces] if spaces else []
        self.append(text)

    def add_raw(self, text: str) -> None:
        """Add text of the content unchanged, with its white space."""
        self.blank_line = self.empty = self.after_marker = False
        self.append(text)

    def _strips(self) -> bool:
        return self._strips_content if self.field is None else self.field.strips

    def append(self, text: str) -> None:
        """Add text of the open region unchanged."""
        last = self._new[-1] if self._new else None
        if isinstance(last, TextDelta) and last.reasoning == self.reasoning:
            last.text += text
        elif text:
            self._new.append(TextDelta(text, self.reasoning))


def split(parts: list[Part]) -> tuple[str, str, list[CallDelta]]:
    """Return the content, the reasoning and the calls in parts."""
    content, reasoning, calls = "", "", list[CallDelta]()
    for part in parts:
        if isinstance(part, CallDelta):
            calls.append(part)
        elif part.reasoning:
            reasoning += part.text
        else:
            content += part.text
    return content, reasoning, calls
