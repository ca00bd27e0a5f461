"""Regions of a chat answer: content, reasoning and tool calls.

    text --markers--> content | reasoning | a reader of calls --RegionReader--> content, reasoning, calls

A response template defines the markers that open and close a region, and the notation of tool calls (`notations.py`).
A model may have a response template in its tokenizer_config.json.  For other models, `response_templates.json` has one
per known chat template.  There is no code per model.

The result of a `RegionReader` after N tokens depends on these tokens alone.  So any gateway can resume an answer, even
inside its reasoning or a tool call.  The time is linear in the number of characters.

White space next to a marker belongs to the marker.  A tool call that cannot be read becomes content, unchanged.
Arguments in JSON are passed on as the model writes them, and repaired if they are not valid JSON (`lenient_json.py`).

A tool call inside the reasoning stays reasoning.  But if the answer ends with the call, the model forgot to close its
reasoning, and the call counts.  So the text of such a call, a draft, is held back until the text after it is known.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec

from quire.service.output.argument_types import Tools
from quire.service.output.call_readers import READERS
from quire.service.output.calls import CallPart, CallReader, Context, End, Status
from quire.service.output.known_templates import digest, known, name_of
from quire.service.output.markers import Marker, Markers, Match
from quire.service.output.notations import (
    Notation,
    compiled,
    free_patterns,
    marker_texts,
    reasoning_texts,
    text_of_calls,
)
from quire.service.output.part_writer import BETWEEN_CALLS, CallDelta, Part, PartWriter, TextDelta, split
from quire.service.output.watches import Watches

__all__ = [
    "CallDelta", "Part", "Reading", "RegionReader", "ResponseTemplate", "TextDelta",
    "digest", "find", "known", "name_of", "split",
]  # fmt: skip

log = logging.getLogger("quire.gateway")


class Reading(msgspec.Struct, frozen=True):
    """Parameters for reading one chat answer, stored with the request so that any gateway can resume the answer."""

    opening: str  # the beginning of the assistant's message in the prompt, such as an opening marker of reasoning
    calls: bool = False  # the request has tools
    tools: list[dict[str, Any]] = []  # names of the tools and types of their arguments
    unsplit: list[str] = []  # names of tools whose calls are passed on once they are complete
    parallel: bool = True  # allow several calls in an answer; otherwise the answer ends after the first call


class ResponseTemplate:
    """A response template, ready to read answers.  Immutable, except for caches."""

    def __init__(self, described: dict[str, Any], name: str = "") -> None:
        """`name`: the template's name in log lines.  Raises ValueError for a template that transformers cannot use."""
        self.name = name
        template = compiled(described)
        self._start = template.start
        self._watches = {calls: Watches(template, calls=calls) for calls in (True, False)}
        self.has_calls = bool(template.notations)
        self.has_reasoning = any(field.kind == "reasoning" for field in template.fields)
        self.nests = any(one.body == "nested" for one in template.notations)
        self.casts = self.has_calls  # the reader needs the names of functions and the types of arguments
        self.notations = template.notations
        self.dropped_patterns = [anchor.pattern.pattern for anchor in template.drop]
        self.free_patterns = free_patterns(template, described)
        self.example = text_of_calls(described, "example")
        self.reasoning_markers = reasoning_texts(described)
        self._markers = marker_texts(described)
        self._call_id = text_of_calls(described, "call_id")

    def call_id(self, name: str, index: str) -> str:
        """Return the id of a call in the model family's form; "" if the family accepts any id."""
        return self._call_id.replace("{name}", name).replace("{index}", index)

    def has_marker(self, special: str) -> bool:
        """Return whether a special token is part of a marker, so that it must be decoded to text."""
        return any(special in text or re.escape(special) in text for text in self._markers)

    def opening(self, prompt: str) -> str | None:
        """Return the text after the last beginning of an assistant's message in a prompt; None if there is none."""
        end = None
        for match in self._start.finditer(prompt):
            end = match.end()
        return None if end is None else prompt[end:]

    def reader(self, reading: Reading) -> RegionReader:
        """Return a new reader for one answer."""
        return RegionReader(self._watches[reading.calls], reading)


class RegionReader:
    """Cuts the text of one answer into regions, as it arrives."""

    __slots__ = (
        "_at", "_broken", "_call", "_clear", "_draft", "_drafted", "_fenced", "_initials", "_line", "_notation",
        "_parallel", "_raw", "_tail", "_text", "_tools", "_watches", "_zero", "ended", "out",
    )  # fmt: skip

    def __init__(self, watches: Watches, reading: Reading) -> None:
        self._watches, self._parallel, self._tools = watches, reading.parallel, Tools(reading.tools)
        template = watches.template
        # First characters of calls that count only at the beginning of a line.
        self._initials = self._tools.initials | watches.begin_line if watches.begin_line is not None else frozenset()
        self._line = False  # the text read so far ends with a line end, and none of it is held back
        self.out = PartWriter(keeps_text=template.keeps_text, strips_content=template.strips, unsplit=reading.unsplit)
        self.ended = False  # True after the only call that the request allows
        # Text from position `_at` on is unread. One character before it is kept, for lookbehind in patterns.
        self._text, self._at = "", 0
        self._zero = -1  # position of the last empty match of a marker, so that it is not matched again
        self._clear = 0  # position before which no marker closes the reasoning
        self._tail = ""  # end of the text, if it may begin the marker that closes the reasoning
        self._call: CallReader | None = None
        self._notation: Notation | None = None
        self._raw: list[str] | None = None  # text of the open call while the call may still become content, else None
        self._fenced = False  # the last call began with a code fence
        self._broken = False  # the next closing markers belong to a call that became content
        self._draft: list[str] | None = None  # text of calls within the reasoning
        self._drafted: list[CallPart] = []  # parts of these calls
        self.push(reading.opening)
        if self._at == len(self._text):
            self._begin_line()
        self.out.start_answer()
        self.ended = False

    @property
    def reasoning(self) -> bool:
        """Whether the reasoning is open."""
        return self.out.reasoning

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self.out.calls

    def push(self, text: str) -> None:
        """Add text of the answer."""
        if not text or self.ended:
            return
        begins = False
        if self._initials:
            if "\n" in text and "\n" in text[:-1]:
                for line in _lines(text):
                    self.push(line)
                return
            begins, self._line = self._line and text[0] in self._initials, False
        done = self._at == len(self._text) > 0 and self._call is None and self._draft is None
        if done and not begins and not self._markers().may_begin_in(text):  # fast path for most text: no search
            self._text, self._at, self._zero, self._clear = text[-1], 1, -1, 0
            self.out.add_text(text)
        else:
            if begins:
                self._begin_line()
            self._text += text
            self._read_all("")
            cut = max(self._at - 1, 0)
            self._text, self._at, self._zero = self._text[cut:], self._at - cut, self._zero - cut
            self._clear -= cut
        if text[-1] == "\n" and self._initials and self._at == len(self._text):
            self._line = self._call is None and self._draft is None and self.out.field is None

    def finish(self, *, cut: bool) -> None:
        """End the answer.  `cut`: its maximum length ended it, so a call without a closing marker is incomplete."""
        if self.ended:
            return
        end: End = "cut" if cut else "whole"
        self._read_all(end)
        if self._draft is not None:
            self._end_draft(end)
        self.out.end(write_space=not self.ended)

    def take(self) -> tuple[str, str, list[CallDelta]]:
        """Return new content, new reasoning and new parts of calls since the last call of this method."""
        return split(self.take_parts())

    def take_parts(self) -> list[Part]:
        """Return the new parts in the model's order.  Consecutive text of one region is one part."""
        return self.out.take()

    @property
    def kind(self) -> str:
        """The open region: "content", "reasoning" or "calls"."""
        if self._call is not None:
            return "calls"
        return "content" if self.out.field is None else self.out.field.kind

    @property
    def waiting_space(self) -> str:
        """White space at the end of the content that is held back, since a marker may follow."""
        return self.out.waiting_space

    # ------------------------------------------------------------------------------------------------------- steps

    def _read_all(self, end: End) -> None:
        self._read(end)
        while self._tail:
            self._text, self._tail = self._text + self._tail, ""
            if self._draft is None:
                self._read(end)

    def _read(self, end: End) -> None:
        """Read the text up to the position at which more text is needed to decide."""
        while not self.ended:
            if self._draft is not None:
                more = self._read_draft(end)
            elif self._call is not None:
                more = self._read_call(end)
            else:
                more = self._read_text(end)
            if not more:
                return

    def _markers(self) -> Markers:
        field = self.out.field
        return self._watches.outside if field is None else self._watches.within[field]

    def _read_text(self, end: End) -> bool:
        """Read text up to a marker; return whether there was one."""
        match, upto = self._markers().next(self._text, self._at, final=bool(end))
        if upto > self._at:
            self.out.add_text(self._text[self._at : upto])
            self._at = upto
        if match is None:
            return False
        refused: tuple[Marker, ...] = ()
        while match is not None and not self._accepts(match):
            refused += (match.marker,)
            match, pending = self._markers().at(self._text, upto, final=bool(end), without=refused)
            if pending:
                return False
        if match is None:
            self.out.add_text(self._text[upto : upto + 1])
            self._at = upto + 1
            return upto < len(self._text)
        self._at = match.found.end()
        if self._at == upto:
            self._zero = upto
        self._enter(match)
        if self._call is None and self.out.field is None and self._draft is None and self._at > upto:
            self._begin_line()
        return True

    def _begin_line(self) -> None:
        r"""Forget the text before the present position, so that `\A` of a marker's pattern matches here."""
        self._text, self._at, self._zero, self._clear = self._text[self._at :], 0, -1, 0

    def _accepts(self, match: Match) -> bool:
        """Return whether a match counts as a marker in the present state."""
        found, kind, notation = match.found, match.marker.kind, match.marker.field
        if found.end() == found.start() and found.start() == self._zero:
            return False
        if kind == "again":
            return self.out.after_marker
        if kind == "stray":
            return self.out.calls > 0
        if kind == "fence":
            return self._fenced and self.out.after_call
        if kind == "closed":  # a second marker that closes the reasoning
            return self.out.after_marker or self.out.empty
        if kind != "call" or not notation.bare:
            return True
        name = found.groupdict().get(notation.captured) if notation.captured else None
        if self._tools:
            if name is not None and name.strip() not in self._tools:
                return False
        elif name is not None or not (self.out.empty or self.out.after_call):
            return False
        return notation.bare != "closed" or self.out.after_call or self.out.blank_line

    def _enter(self, match: Match) -> None:
        """Continue after a marker."""
        kind, text = match.marker.kind, match.found[0]
        if kind != "stray":
            self._fenced = kind != "fence" and (text.startswith("```") or (self._fenced and self.out.after_marker))
        if kind == "stray" and self._broken:
            self.out.add_marker(text)
            return
        if self.reasoning and kind in ("call", "drop"):
            self._draft, self._drafted, self._raw = [text], [], None
            if kind == "call":
                self._begin_call(match)
            return
        self.out.pass_marker(opens=kind in ("call", "region"))
        if kind == "call":
            self._begin_call(match)
        elif kind != "again":
            self.out.field = match.marker.field if kind == "region" else None
            if shown := match.found.groupdict().get("shown"):
                self.out.add_text(shown + "\n")

    # ------------------------------------------------------------------------------------------------------- calls

    def _begin_call(self, match: Match) -> None:
        notation = match.marker.field
        name = match.found.groupdict().get(notation.captured) or "" if notation.captured else ""
        context = Context(
            notation, self._tools.own_name(name.strip()), self._tools, self._parallel, *self._watches.ends(notation)
        )
        self._notation, self._call, self._raw = notation, READERS[notation.body](context), [match.found[0]]

    def _read_call(self, end: End) -> bool:
        """Continue to read a call.  Returns whether it has ended."""
        call, before = self._call, self._at
        assert call is not None
        self._at, status = call.read(self._text, before, end)
        if self._raw is not None:
            self._raw.append(self._text[before : self._at])
        if call.committed or call.parts:
            self._raw = None
        parts, call.parts = call.parts, []
        self.out.add_calls(parts, self._tools)
        if status is Status.NEXT:
            self._raw = [""]
            self.out.begin_next_call()
        elif status is Status.BROKEN or (status is Status.MORE and end):
            self._break_call()
        elif status is Status.DONE:
            self._end_call()
        return status is not Status.MORE

    def _end_call(self) -> None:
        self._call, self._raw, self._broken = None, None, False
        self.out.end_call()
        self._begin_line()
        self.ended = self.out.calls > 0 and not self._parallel

    def _break_call(self) -> None:
        """Turn a call that cannot be read into content, unless a part of it was already emitted."""
        raw, notation = self._raw, self._notation
        self._call, self._raw = None, None
        if raw is None or notation is None:  # the call was emitted; only the text after it cannot be read
            self.out.after_call = self.out.after_marker = True
        elif self.out.calls and not notation.captured and notation.holds_nothing("".join(raw[1:])):
            self._end_call()
        elif notation.hides_markers:
            self.out.break_call("".join(raw[1:]), raw=False)
        else:
            self._broken = bool(raw and raw[0])
            self.out.break_call("".join(raw), raw=True)

    # ------------------------------------------------------------------------------------------------------ drafts

    def _is_closed(self, end: End) -> bool:
        """Return whether the unread text closes the reasoning.

        If the end of the text may begin the closing marker, it moves to `_tail`."""
        field = self.out.field
        assert field is not None
        match, upto = self._watches.closing[field].next(
            self._text, max(self._at, self._clear), final=bool(end) and not self._tail
        )
        self._clear = upto
        if match is None and upto < len(self._text):
            self._text, self._tail = self._text[:upto], self._text[upto:] + self._tail
        return match is not None

    def _read_draft(self, end: End) -> bool:
        """Continue to read calls within the reasoning.  Returns whether they turned out to be plain reasoning."""
        assert self._draft is not None
        if self._is_closed(end):
            self._release_draft()
            self.out.add_text(self._text[self._at : self._clear])
            self._at = self._clear
            return True
        if self._read_drafted(self._text, end if not self._tail else "") is Status.BROKEN:
            self._release_draft()
            return True
        return False

    def _read_drafted(self, text: str, end: End) -> Status:
        """Read tool calls inside the reasoning, up to the end of a text.  Returns MORE (calls may follow) or BROKEN."""
        assert self._draft is not None
        while self._at < len(text) or (end and self._call is not None):
            before, status = self._at, Status.MORE
            if self._call is not None:
                self._at, status = self._call.read(text, before, end)
                self._drafted += self._call.parts
                self._call.parts = []
                if status is Status.DONE:
                    self._call = None
            elif between := BETWEEN_CALLS.match(text, before)[0]:  # type: ignore[index]
                self._at = before + len(between)
            else:
                match, pending = self._watches.drafts.at(text, before, final=bool(end))
                if match is not None:
                    self._at = match.found.end()
                    if match.marker.kind == "call":
                        self._begin_call(match)
                elif not pending:
                    status = Status.BROKEN
            self._draft.append(text[before : self._at])
            if status is Status.BROKEN or (self._at == before and status is Status.MORE):
                return status
        return Status.MORE

    def _release_draft(self) -> None:
        """Write the tool calls inside the reasoning as plain reasoning text."""
        assert self._draft is not None
        text, self._draft, self._call = "".join(self._draft), None, None
        self._drafted = []
        self.out.add_text(text)

    def _end_draft(self, end: End) -> None:
        """End an answer whose reasoning ends in tool calls: complete calls count, unless a limit cut the answer."""
        if end == "cut" or self._call is not None or not any(name for name, _ in self._drafted):
            self._release_draft()
            return
        parts = self._drafted
        if not self._parallel:
            others = [at for at, (name, _) in enumerate(parts) if name][1:]
            parts = parts[: others[0]] if others else parts
        self._draft = None
        self.out.end_in_call()
        self.out.add_calls(parts, self._tools)
        self._end_call()


def _lines(text: str) -> list[str]:
    """Return the lines of a text with their line ends.  Only "\\n" ends a line."""
    *lines, rest = text.split("\n")
    return [*(line + "\n" for line in lines), rest]


def find(chat_template: str, shipped: Any = None) -> ResponseTemplate | None:
    """Return the response template that a model ships, or the one for its chat template.

    None: no template is known, so the complete answer is content."""
    if shipped is not None:
        try:
            return ResponseTemplate(shipped, "the model's own")
        except Exception as error:  # transformers' checks raise errors of several types
            log.warning("the model's response_template cannot be used, so a known one is looked for: %s", error)
    name = name_of(chat_template)
    return ResponseTemplate(known().response_templates[name], name) if name is not None else None
