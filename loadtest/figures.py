"""Compare the measured values on the pages with the result files, or rewrite the pages.

    python -m quire.loadtest figures            write each page's values from loadtest/results/
    python -m quire.loadtest figures --check    exit status 1 if a page and its files differ, or a number has no file

`loadtest/pages/` defines which value of which result file is at which place of a page.  A number of a page that is
neither such a value nor in one of the page's `FACTS` is an error, so a new measurement needs a result file.  Numbers in
code, links and names such as H200 are not checked.  A result file must name its command, machine and clean commit.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.loadtest import machine
from quire.loadtest.pages import CLOSE, OPEN, Results, benchmarks, locality, quantisation, readme, scaling

PAGES: tuple[ModuleType, ...] = (readme, benchmarks, scaling, quantisation, locality)
VALUE = r"-?\d[\d,]*(?:\.\d+)?"  # a measured value on a page
# A number without adjacent letters: not 8B, H200, int8, x86-64, #3 or the third part of a version.
NUMBER = re.compile(r"(?<![\w.#^/-])\d[\d,]*(?:\.\d+)?(?!\w|\.\d|[-‑](?=\w))")
# Skipped: the table of result files, code blocks, code spans, targets of links, comments, numbers of list items.
UNREAD = re.compile(
    r"<!-- result files.*?<!-- end|^```.*?^```|^    .*?$|`[^`]*`|\]\([^)]*\)|<!--.*?-->|^\s*\d+\. |^#.*?$",
    re.MULTILINE | re.DOTALL,
)
HASH = re.compile(r"\b[0-9a-f]{7,10}\b")
SOURCES = ("<!-- result files: written by `python -m quire.loadtest figures` -->", "<!-- end of result files -->")


@dataclass
class Compared:
    """The comparison of one page with its result files."""

    text: str  # the page's text with the values of the files
    errors: list[str] = field(default_factory=list)


def pattern(line: str, *, exact: bool) -> re.Pattern[str]:
    """Return a pattern that finds `line` on a page, with line breaks anywhere and, unless exact, with any numbers."""
    parts = re.split(f"{OPEN}(.*?){CLOSE}", line)
    found = []
    for index, part in enumerate(parts):
        if index % 2:
            found.append(f"({re.escape(part)})" if exact else f"({VALUE})")
        else:
            found.append(r"\s+".join(re.escape(word) for word in re.split(r"\s+", part)))
    return re.compile("".join(found))


def compare(text: str, lines: list[str], facts: list[str]) -> Compared:
    """Compare a page's text with the lines of its module, and insert the files' values where they differ."""
    errors = []
    for line in lines:
        if len(pattern(line, exact=True).findall(text)) == 1:
            continue
        plain = line.replace(OPEN, "").replace(CLOSE, "")
        matches = list(pattern(line, exact=False).finditer(text))
        if len(matches) != 1:
            errors.append(f"the page has {len(matches)} texts like: {plain}")
            continue
        errors.append(f"the page says: {' '.join(matches[0].group().split())}; the file: {plain}")
        values = re.findall(f"{OPEN}(.*?){CLOSE}", line)
        for group in range(len(values), 0, -1):
            start, end = matches[0].span(group)
            text = text[:start] + values[group - 1] + text[end:]
    return Compared(text, [*errors, *unfiled(text, lines, facts)])


def unfiled(text: str, lines: list[str], facts: list[str]) -> Iterator[str]:
    """Yield an error for each number in no line and no fact, and for each fact that the page lacks."""
    known = [match.span() for line in lines for match in pattern(line, exact=True).finditer(text)]
    for fact in facts:
        spans = [match.span() for match in pattern(fact.replace("#", f"{OPEN}{CLOSE}"), exact=False).finditer(text)]
        if not spans:
            yield f"FACTS has a text that the page lacks: {fact}"
        known += spans
    read = UNREAD.sub(lambda match: re.sub(r"\S", " ", match.group()), text)
    for match in NUMBER.finditer(read):
        if not any(start <= match.start() and match.end() <= end for start, end in known):
            line = text.count("\n", 0, match.start()) + 1
            around = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
            yield f"line {line}: {match.group()} is in no result file: ...{around}..."


def values_of(result: Any, key: str) -> Iterator[str]:
    """Yield each text under `key`, at any depth of a result."""
    children = result.values() if isinstance(result, dict) else result if isinstance(result, list) else []
    if isinstance(result, dict) and key in result:
        found = result[key]
        yield from found if isinstance(found, list) else [str(found)]
    for child in children:
        yield from values_of(child, key)


def origin(name: str, result: dict[str, Any]) -> tuple[str, list[str]]:
    """Return a result file's row for the table of sources, and the problems of its origin."""
    commits = [commit for key in ("commit", "after") for commit in values_of(result, key)]
    hashes = list(dict.fromkeys(h[:8] for commit in commits for h in HASH.findall(commit)))
    gpu = str(result.get("gpu") or "").partition(",")[0].removeprefix("NVIDIA ")
    where = gpu or result.get("machine") or f"{result.get('cores')} cores of {result.get('cpu')}"
    wrong = []
    if not hashes:
        wrong.append(f"{name}: no commit")
    if any("dirty" in commit for commit in commits):
        wrong.append(f"{name}: measured on a tree with uncommitted changes")
    if not next(values_of(result, "command"), ""):
        wrong.append(f"{name}: no command")
    if where == "None cores of None":
        wrong.append(f"{name}: no machine")
    date = str(result.get("time") or result.get("date") or "")[:10]
    return f"| `{name}.json` | {date} | {', '.join(hashes[:3])} | {str(where).partition(';')[0]} |", wrong


def sources(results: Results) -> tuple[str, list[str]]:
    """Return the table of all result files that pages use, and the problems of their origins."""
    rows, wrong = [], []
    for name, result in sorted(results.used.items()):
        row, lacks = origin(name, result)
        rows.append(row)
        wrong += lacks
    head = "| file | date | commit | machine |\n|---|---|---|---|\n"
    return f"{SOURCES[0]}\n{head}" + "\n".join(rows) + f"\n{SOURCES[1]}", wrong


def compare_pages(root: Path, folder: Path) -> tuple[dict[Path, str], list[str]]:
    """Compare all pages of `root` with the results of `folder`; return the pages' new texts and all differences."""
    results = Results(folder)
    texts, errors = {}, []
    for module in PAGES:
        path = root / module.PAGE
        done = compare(path.read_text(encoding="utf-8"), list(module.lines(results)), module.FACTS)
        texts[path] = done.text
        errors += [f"{module.PAGE}: {error}" for error in done.errors]
    table, wrong = sources(results)
    path = root / benchmarks.PAGE
    before, _, rest = texts[path].partition(SOURCES[0])
    after = rest.partition(SOURCES[1])[2]
    if f"{before}{table}{after}" != texts[path]:
        errors.append(f"{benchmarks.PAGE}: the table of result files is not current")
    texts[path] = f"{before}{table}{after}"
    return texts, errors + wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if anything differs")


def main(args: argparse.Namespace, command: str) -> int:
    texts, errors = compare_pages(machine.ROOT, machine.RESULTS)
    print("\n".join(errors) or f"{len(texts)} pages agree with their result files")
    if args.check:
        return int(bool(errors))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return int(bool(compare_pages(machine.ROOT, machine.RESULTS)[1]))
