"""Comments of the kernels: a trailing comment stands alone with its unit, it does not continue the name before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
CONTINUES = re.compile(r"(of|that|which|whose|likewise|as many|as much)\b")
# Literals before comments, so that the `//` in a string is no comment.
TOKEN = re.compile(
    r"""R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\])+'|/\*.*?\*/|//(?P<comment>[^\n]*)""",
    re.DOTALL,
)


def trailing_comments(text: str) -> Iterator[tuple[int, str]]:
    """Line numbers and texts of `//` comments that follow code on their line."""
    for token in TOKEN.finditer(text):
        comment = token["comment"]
        start = text.rfind("\n", 0, token.start()) + 1
        if comment is not None and text[start : token.start()].strip():
            yield text.count("\n", 0, token.start()) + 1, comment.strip()


def continuing(text: str) -> list[int]:
    return [line for line, comment in trailing_comments(text) if CONTINUES.match(comment)]


def test_a_comment_that_continues_a_name_is_found() -> None:
    text = """// of a file
int blocks;  // 16s of rows
int records;  // of a row
const char* url = "http://of";  // an address
int most = 1'000;  // that fit
/* int x;  // of a block comment */
"""
    assert continuing(text) == [3, 5]
    assert len(list(trailing_comments(text))) == 4


def test_trailing_comments_of_the_kernels_stand_alone() -> None:
    wrong = []
    for path in CSRC.rglob("*"):
        if path.suffix in (".cpp", ".h", ".cu", ".cuh"):
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            wrong += [f"{path.relative_to(CSRC)}:{line}: {lines[line - 1].strip()}" for line in continuing(text)]
    assert wrong == []
