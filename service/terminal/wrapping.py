"""Word wrap of streamed text: a word is held back until its end is known, or until it fills a line."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import cell_len

# A line end; spaces; a wide character, after which a line may break; a run of other characters.
PARTS = re.compile(
    r"\n|[^\S\n]+|[\u1100-\u11ff\u2e80-\uffef\U0001f000-\U0003ffff]|[^\s\u1100-\u11ff\u2e80-\uffef\U0001f000-\U0003ffff]+"
)


class Wrapper:
    """Writes text, and ends the line before each word that does not fit on it."""

    def __init__(self, width: int, write: Callable[[str], None]) -> None:
        """`width`: columns, >= 1; 0: text is neither wrapped nor held back."""
        self._width, self._write = width, write
        self._column = 0
        self._word = ""
        self._blanks = ""  # spaces before the word; omitted if the word begins a line

    def feed(self, text: str) -> None:
        """Add text, which may end within a word."""
        if not self._width:
            self._write(text)
            return
        for part in PARTS.findall(text):
            if part == "\n":
                self._end_word()
                self._write("\n")
                self._column, self._blanks = 0, ""
            elif part.isspace():
                self._end_word()
                self._blanks += part.replace("\t", "    ")
            elif cell_len(part) > len(part) or part >= "\u1100":
                self._end_word()
                self._word = part
                self._end_word()
            else:
                self._word += part
                while cell_len(self._word) > self._width:  # the word is longer than a line: cut it
                    self._word, rest = self._word[: self._width], self._word[self._width :]
                    self._end_word()
                    self._word = rest

    def flush(self) -> None:
        """Write the word that is held back, when the text ends or pauses."""
        if self._width:
            self._end_word()

    @property
    def at_line_start(self) -> bool:
        return not self._column

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        cells = cell_len(self._blanks) + cell_len(word)
        if self._column and self._column + cells > self._width:
            self._write("\n" + word)
            self._column = cell_len(word)
        else:
            self._write(self._blanks + word)
            self._column += cells
        self._blanks = ""
