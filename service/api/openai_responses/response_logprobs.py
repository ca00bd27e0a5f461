"""Log probabilities of `/v1/responses`: each entry belongs to the text block that has the bytes of its token.

    pieces --ResponseLogprobs.add--> entries that wait --grow, as a block's text is sent--> that block's entries

An entry may be complete later than its text is sent, when the token also holds what is no text.
"""

from __future__ import annotations

from collections import deque

import msgspec

from quire.service.api.logprobs import Columns, LogprobFormat
from quire.service.api.valid_request import ValidRequest
from quire.service.output.pieces import Piece

Entry = msgspec.Raw


class ResponseLogprobs:
    """The entries of one answer, by block."""

    def __init__(self, valid: ValidRequest, vocabulary: list[bytes]) -> None:
        self._format = LogprobFormat(valid, vocabulary)
        self._waiting: deque[tuple[Entry, int]] = deque()  # entries with the bytes of their text
        self._due: deque[list[int]] = deque()  # [block, bytes of its text without an entry]
        self._found: dict[int, list[Entry]] = {}

    def add(self, piece: Piece) -> None:
        """Add the entries of a delta."""
        entries = piece.content or []
        columns = Columns(
            [one.token for one in entries], [one.at for one in entries], [], [one.text for one in entries]
        )
        for entry in self._format.entries(columns)["content"]:
            self._waiting.append((msgspec.Raw(msgspec.json.encode(entry)), len(entry["bytes"])))

    def grow(self, block: int, text: str) -> list[Entry]:
        """Return the entries that `text`, the next of a text block, completes; those of earlier blocks join theirs."""
        self._due.append([block, len(text.encode())])
        before = len(self.of(block))
        self._share()
        return self.of(block)[before:]

    def of(self, block: int) -> list[Entry]:
        """Return the entries of a text block so far."""
        return self._found.setdefault(block, [])

    def end(self) -> None:
        """Give the last text block what came after its text."""
        self._share()
        while self._waiting and self._found:
            self.of(max(self._found)).append(self._waiting.popleft()[0])

    def _share(self) -> None:
        while self._waiting and self._due:
            entry, left = self._waiting.popleft()
            self.of(self._due[0][0]).append(entry)
            while self._due and left >= self._due[0][1]:
                left -= self._due.popleft()[1]
            if self._due:
                self._due[0][1] -= left
