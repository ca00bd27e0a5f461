"""The markers that a RegionReader searches for in each of its states."""

from __future__ import annotations

import re
from typing import Any

from quire.service.output.marker_beginnings import beginnings
from quire.service.output.markers import Marker, Markers
from quire.service.output.notations import LINE, Anchor, Field, Notation, Template

# Closing tags that models sometimes write twice, with or without DeepSeek's prefix.
CLOSING_TAG = r"</(?:\W?DSML\W)?(?:param|parameter|argument|arg_key|arg_value|value|function|invoke)>"
_NAME = r"(?P<name>[\w.\-]{1,130})\s*\(\s*(?P<object>(?:\*\*)?\{)?(?!\*)"


class Watches:
    """The markers for each state of a RegionReader, for requests with or without tools (`calls`)."""

    def __init__(self, template: Template, *, calls: bool) -> None:
        import regex  # installed with transformers, which compiles these patterns with it

        self.template, self.notations = template, template.notations if calls else []
        drop = [_marker("drop", anchor) for anchor in template.drop]
        regions = [_marker("region", field.open, field) for field in template.fields]
        # The first of several matches of equal length is used, so the general notation of a family is last.
        every = self.notations[::-1]
        calling = [Marker("call", _in_fence(one.open), one, one.open.grows) for one in every]
        # First characters of calls that count only at the beginning of a line, except calls that begin with a
        # function's name.
        lined = [one.open.pattern.pattern.removeprefix(LINE) for one in every if one.is_lined]
        self.begin_line = frozenset(text[0] for one in lined for text in beginnings(one) if text) if lined else None
        fence = [Marker("fence", regex.compile(r"```\s*"))] if calling else []
        dropped = [Marker("drop", _in_fence(one), grows=one.grows) for one in template.drop] if calling else drop
        stray = [
            _marker("stray", anchor, one, empty=False)
            for one in self.notations
            for anchor in (one.close, one.alone)
            if anchor is not None
        ]
        closed = [
            _marker("closed", field.close, empty=False)
            for field in template.fields
            if field.kind == "reasoning" and field.close is not None
        ]
        self.outside = Markers([*calling, *regions, *dropped, *stray, *closed, *fence])
        marked = [_marker("call", one.open, one) for one in every if not one.bare]
        self.drafts = Markers([*marked, *drop, *stray])
        self.within: dict[Field, Markers] = {}
        self.closing: dict[Field, Markers] = {}
        for field in template.fields:
            close = [_marker("close", field.close, wins=True)] if field.close is not None else []
            again = [_marker("again", field.open)] if field.kind == "reasoning" else []
            drafts = [*marked, *(drop if marked else [])] if field.kind == "reasoning" else []
            self.within[field], self.closing[field] = Markers([*close, *again, *drafts]), Markers(close)
        self._ends: dict[Notation, tuple[Markers, Markers]] = {}
        for one in self.notations:
            ends: list[Marker] = [_marker("close", one.close)] if one.close is not None else []
            others = [other for other in self.notations if not other.bare or one.body == other.body == "tags"]
            ends += [_marker("call", other.open, other, empty=False) for other in others]
            values: list[Marker] = []
            if one.body == "python":
                ends.append(Marker("name", regex.compile(_NAME)))
            if one.argument[0]:
                opens, closes = one.argument
                bounds = [opens, CLOSING_TAG, *(marker.pattern.pattern for marker in ends)]
                follows = "|".join(f"(?:{_unnamed(bound)})" for bound in bounds)
                opening = [*(other.open for other in others), *template.drop]
                another = "|".join(f"(?:{_unnamed(anchor.pattern.pattern)})" for anchor in opening)
                after = regex.compile(rf"(?:{closes})\s*(?:\Z|(?={follows}))", regex.DOTALL)
                argument = Marker("argument", regex.compile(opens, regex.DOTALL))
                line = regex.compile(rf"\n[ \t]*(?:{opens})", regex.DOTALL)
                values = [Marker("closes", after), Marker("argument", line)]
                if one.close is not None:
                    full = rf"\r?\n?(?:{_unnamed(one.close.pattern.pattern)})\s*(?:\Z|(?={another}))"
                    values.append(Marker("close", regex.compile(full, regex.DOTALL)))
                ends += [argument, Marker("junk", regex.compile(CLOSING_TAG))]
            self._ends[one] = Markers(ends), Markers(values)

    def ends(self, notation: Notation) -> tuple[Markers, Markers]:
        """Return the markers that end calls of a notation, and the markers that end one argument in tags."""
        return self._ends[notation]


def _marker(kind: str, anchor: Anchor, field: Any = None, **more: bool) -> Marker:
    return Marker(kind, anchor.pattern, field, anchor.grows, **more)


def _in_fence(anchor: Anchor) -> Any:
    """Return a marker's pattern with an optional line before it that opens a code fence, such as "```xml".

    A fence without a word may be the end of code before the marker."""
    import regex

    return regex.compile(rf"(?:```\w+[ \t]*\r?\n\s*)?(?:{anchor.pattern.pattern})", anchor.pattern.flags)


def _unnamed(pattern: str) -> str:
    """Return a pattern without group names, so that it can be a part of another pattern."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)
