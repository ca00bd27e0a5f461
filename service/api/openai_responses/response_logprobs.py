"""Log probabilities of `/v1/responses`: assigns each entry to the text block that contains the bytes of its token.

    deltas --ResponseLogprobs.add--> waiting entries --grow, when a block's text is sent--> that block's entries

An entry may arrive after its text was sent, if its token also contains bytes that are not part of the block's text.
"""

from __future__ import annotations

from collections import deque

import msgspec

from quire.service.api.logprobs import Columns, LogprobFormat
from quire.service.api.valid_request import ValidRequest
from quire.service.output.choice_delta import ChoiceDelta

Entry = msgspec.Raw


class ResponseLogprobs:
    """The entries of one answer, by block."""

    def __init__(self, valid: ValidRequest, vocabulary: list[bytes]) -> None:
        self._format = LogprobFormat(valid, vocabulary)
        self._waiting: deque[tuple[Entry, int]] = deque()  # (entry, size of its text in bytes)
        self._due: deque[list[int]] = deque()  # [block, number of bytes of its text that have no entry yet]
        self._found: dict[int, list[Entry]] = {}  # block -> its entries

    def add(self, delta: ChoiceDelta) -> None:
        """Add the entries of a delta."""
        entries = delta.content or []
        columns = Columns(
            [one.token for one in entries], [one.at for one in entries], [], [one.text for one in entries]
        )
        for entry in self._format.entries(columns)["content"]:
            self._waiting.append((msgspec.Raw(msgspec.json.encode(entry)), len(entry["bytes"])))

    def grow(self, block: int, text: str) -> list[Entry]:
        """Add `text` to a text block.  Returns the entries that are now complete for this block."""
        self._due.append([block, len(text.encode())])
        before = len(self.of(block))
        self._share()
        return self.of(block)[before:]

    def of(self, block: int) -> list[Entry]:
        """Return the entries of a text block so far."""
        return self._found.setdefault(block, [])

    def end(self) -> None:
        """Assign the remaining entries to the last text block."""
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
