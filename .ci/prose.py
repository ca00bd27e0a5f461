"""Report how comments and docstrings read: words a sentence, and words that the glossary replaces.

    python .ci/prose.py [--words] [FOLDER ...]

Prints one line a folder: sentences, median and 95th percentile of words a sentence, and how often a word of ALSO or of
the right column of CONTRIBUTING.md's glossary occurs. `--words` adds which ones. Some of them are right in another
meaning (a lost packet), so the count is for comparisons, and nothing fails. `row` is not counted in folders about
matrices.

A sentence is text of a docstring or a `#` or `//` comment between full stops. Indented blocks, tables, drawings and
directives for tools are left out. A comment behind code is a text of its own.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALSO = ("whoever", "somebody", "nobody", "everybody", "those who", "so many times as", "beside")
MATRICES = ("csrc/", "engine/executor/ops.py", "engine/executor/sampling.py", "loadtest/kernels/", "tests/kernels/")
ROOMS = ("service", "engine/common", "engine/core", "engine/executor", "engine/tools", "engine/wire", "engine")
DIRECTIVES = re.compile(r"^(noqa|type:|mypy:|ruff:|pragma|fmt:|!)|^-*\s*$|^[-=*]{3,}")
DRAWING = re.compile(r"[|`+<>─│└├┌┐┘┴┬]{2,}|-{2,}>|\s{3,}\S")


def glossary() -> list[str]:
    """The right column of the glossary: words not to be used."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.split("### Glossary")[1].split("\n\n")[2]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [word.strip() for row in rows for word in row[1].split(",")]


def pattern(word: str) -> re.Pattern[str]:
    """A whole word or phrase. A name with a capital counts inside a sentence only, where no ordinary word has one."""
    if word[0].isupper():
        return re.compile(rf"(?<=[a-z,;:(`] ){word}\b|`{word}`")
    if word == "pressure":
        return re.compile(r"(?<!memory )\bpressure\b", re.IGNORECASE)
    return re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)


def python_prose(text: str) -> Iterator[str]:
    """Docstrings, and runs of comment lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield docstring
    comments = [
        (
            token.start[0],
            token.start[1],
            token.string.lstrip("#").removeprefix(" "),
            bool(token.line[: token.start[1]].strip()),
        )
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from joined(comments)


def cpp_prose(text: str) -> Iterator[str]:
    """Runs of `//` comments."""
    comments = []
    for number, line in enumerate(text.splitlines()):
        at = line.find("//")
        if at >= 0 and (at == 0 or line[at - 1] != ":"):
            comments.append((number, at, line[at + 2 :].removeprefix(" "), bool(line[:at].strip())))
    yield from joined(comments)


def joined(comments: list[tuple[int, int, str, bool]]) -> Iterator[str]:
    """Comments on consecutive lines and in one column are one text. Takes (line, column, text, is it behind code?)."""
    lines: list[str] = []
    before = (-2, -1)
    for number, column, text, behind in comments:
        if lines and (behind or (number, column) != (before[0] + 1, before[1])):
            yield "\n".join(lines)
            lines = []
        if not DIRECTIVES.match(text):
            lines.append(text)
        before = (number, column)
    if lines:
        yield "\n".join(lines)


def sentences(text: str) -> Iterator[str]:
    """The sentences of one docstring or comment."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if not line.startswith("  ") and not DRAWING.search(line)]
        whole = " ".join(" ".join(lines).split())
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`\"(])", whole):
            if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= 2:
                yield sentence


def folder(name: str) -> str:
    return next((room for room in ROOMS if name.startswith(f"{room}/")), name.split("/")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description="Report how comments and docstrings read.")
    parser.add_argument("--words", action="store_true", help="say which words were found")
    parser.add_argument("folders", nargs="*", help="only these")
    options = parser.parse_args()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    words = {word: pattern(word) for word in [*glossary(), *ALSO]}
    lengths: dict[str, list[int]] = {}
    found: dict[str, Counter[str]] = {}
    for name in sorted(set(listed.stdout.splitlines())):
        path = ROOT / name
        if path.suffix not in (".py", ".cpp", ".h", ".cu", ".cuh") or not path.is_file():
            continue
        if options.folders and not name.startswith(tuple(options.folders)):
            continue
        text = path.read_text(encoding="utf-8")
        counts, sizes = found.setdefault(folder(name), Counter()), lengths.setdefault(folder(name), [])
        for prose in python_prose(text) if path.suffix == ".py" else cpp_prose(text):
            for sentence in sentences(prose):
                sizes.append(len(sentence.split()))
                for word, sought in words.items():
                    if word == "row" and name.startswith(MATRICES):
                        continue
                    counts[word] += len(sought.findall(sentence))
    print(f"{'folder':18}{'sentences':>10}{'median':>8}{'p95':>6}{'over 25':>9}{'glossary':>10}")
    lengths["all"] = [size for sizes in lengths.values() for size in sizes]
    found["all"] = sum(found.values(), Counter())
    for room, sizes in lengths.items():
        if not sizes:
            continue
        p95 = sorted(sizes)[min(len(sizes) - 1, len(sizes) * 95 // 100)]
        over = sum(size > 25 for size in sizes)
        total = found[room].total()
        print(f"{room:18}{len(sizes):>10}{statistics.median(sizes):>8g}{p95:>6}{over:>9}{total:>10}")
        if options.words:
            print("    " + ", ".join(f"{word} {count}" for word, count in found[room].most_common() if count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
