"""Readers that parse a call only once its text is complete."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire.service.common.surrogates import json_of
from quire.service.output.calls import CallPart, Context, End, Status, calls_of


class CompleteCalls(ABC):
    """Collects the text up to the closing marker, then parses it."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context = context
        self._body: list[str] = []

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """See `CallReader.read`."""
        match, upto = self._context.ends.next(text, at, final=bool(end))
        while match is not None and match.marker.kind != "close":
            match, upto = self._context.ends.next(text, upto + 1, final=bool(end))
        self._body.append(text[at:upto])
        if match is None and not end:
            return upto, Status.MORE
        calls = None if match is None and end == "cut" else self._calls("".join(self._body))
        if calls is None:
            return match.found.end() if match is not None else upto, Status.BROKEN
        self.parts += calls if self._context.parallel else calls[:1]
        return match.found.end() if match is not None else upto, Status.DONE

    @abstractmethod
    def _calls(self, text: str) -> list[CallPart] | None:
        """Return the calls in a text; None if it contains no valid call."""


class WholeCalls(CompleteCalls):
    """Reads calls in a notation that only transformers can parse."""

    def _calls(self, text: str) -> list[CallPart] | None:
        from transformers.utils.chat_parsing.content_parsers import process_field

        notation = self._context.notation
        try:
            value = process_field(text, notation.described, {notation.captured: self._context.name})
            found = json_of(value)
        except Exception:  # a content parser may raise any error for text that is not what it expects
            return None
        return calls_of(found, notation)
