"""Count words of the glossary's wrong column in comments, docstrings, texts and pages.

    python .ci/prose.py [--words] [--lines] [FOLDER ...]    report: a line per folder; with --lines each violation
    python .ci/prose.py --check                             fail if a folder has more than .ci/prose_limits.toml allows
    python .ci/prose.py --write                             lower the limits to the present counts

The limits are a ratchet: `--write` refuses when the total has grown.  Code that moves between folders moves its counts
along.  The words are those of the right column of CONTRIBUTING.md's glossary and of ALSO.  A word that is right in
another sense (a whole number, a product line) has a rule in RULES or FOLDERS, so that a hit is a violation.

A sentence is text of a docstring, a comment, a page or a string of at least four words, between full stops.  Indented
blocks, tables, drawings, code in backticks and directives for tools are left out.
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
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / ".ci" / "prose_limits.toml"
ALSO = ("whoever", "somebody", "nobody", "everybody", "those who", "so many times as", "beside", "as ever", "where")
UNITS = (
    r"ms|us|ns|s|[KMGT]i?B|bytes|bits|seconds|milliseconds|tokens|requests|steps|times|prompts|chunks|events|entries"
    r"|words|lines|line|launches|calls|trips?|commands|scripts|blocks|pages|rows|values|numbers|answers|messages"
    r"|sequences|connections|streams|sentences|exchanges|once|twice|one|\d[\d,.]*"
)
PARTS = r"token|step|sequence|block|layer|head|row|choice|slot|prompt|value|number"
BASES = (
    r"request|stream|engine|gateway|rank|GPU|turn|tenant|process|folder|sentence|key|script|message|weight|machine|thread"
    r"|warp|lane"
)
CLAUSE = (
    r"(?! (?:has|had|may|can|is|was|needs|holds|takes|does|gets|will|must|of|that|at|before|after|until|or|and|in))"
)
BITS = r"(?:of|with|in|from) (?:4|8|16|four|eight) (?:or (?:4|8|16|four|eight) )?bits"

# A pattern for a word that is right in another sense.  The others match as whole words.
RULES = {
    "product": r"(?<!dot )(?<!inner )(?<!outer )(?<!this )(?<!the )(?<!cross )\bproducts?\b(?! (?:lines?|code)\b)"
    r"|\bthe products\b|\bthe product (?=of|in|that|reads|writes|with|waits|takes)",
    "numbers": r"(?<!whole )(?<!line )(?<!random )(?<!sequence )(?<!version )(?<!turn )\bnumbers\b"
    r"(?! of (?:choices|blocks|tokens|ranks|requests|layers|heads|sequences|threads|rows|steps)\b)"
    r"(?! (?:\d|\w+ \*))(?<!contain numbers)(?<!have numbers)",
    "weights of 4 bits": rf"\b(?:weights|layers|experts|checkpoints|values|activations) {BITS}\b",
    "products with 4 bits": rf"\b(?:products?|numbers|multiplications|GEMMs?) {BITS}\b",
    "ms a token": rf"\b(?:{UNITS}) an? (?:{PARTS}){CLAUSE}\b",
    "a second": rf"\b(?:{UNITS}) an? (?:second|minute|hour|day|week)\b"
    r"(?! (?:of|later|before|after|or two|old|request)\b)",
    "a request": rf"\b(?:{UNITS}) an? (?:{BASES}){CLAUSE}\b",
    "piece": r"(?<!one )\bpieces?\b(?! of (?:advice|paper)\b)",
    "greatest": r"\bgreatest\b(?! common)",
    "least": r"(?<!at )(?<!At )(?<!not )\bleast\b(?!-| (?:significant|recently|squares|common)\b)",
    "most": r"\bthe most (?:tokens|bytes|blocks|slots|requests|sequences|rows|positions|values)\b",
    "divided": r"\bdivided (?:logits|layers?|models?|weights?|heads?|parts?|embeddings?|vocabulary|among|over)\b",
    "sums of ranks": r"\bsums? (?:of|over|across|from) (?:the |all |other |several )?(?:ranks?|GPUs?)\b"
    r"|\branks' sums?\b",
    "continuation": r"\bcontinuations?\b(?! (?:bytes?|lines?|frames?)\b)",
    "whole": r"(?<!as a )(?<!on the )\bwhole\b(?![- ]numbers?\b| words?\b| multiples?\b)",
    "room": r"\brooms?\b",
    "trial": r"\btrials?\b(?! division)",
    "acquit": r"\bacquit\w*",
    "convict": r"\bconvict\w*",
    "rung": r"(?<!has )(?<!have )(?<!been )(?<!is )(?<!are )\brungs?\b",
    "bell": r"\bbells?\b",
    "tail": r"(?<!heavy )\btails?\b(?! (?:latency|of (?:a|the) (?:prompt|text|distribution))\b)",
    "exchange": r"\bexchanges?\b",
    "end token": r"\bend tokens?\b",
    "blank": r"\bblanks?\b(?! lines?\b)",
    "door": r"\bdoors?\b",
    "seat": r"\bseats?\b",
    "pressure": r"(?<!memory )(?<!register )(?<!back )\bpressure\b",
    "books": r"\bthe books\b|\bbooks (?:balance|are|must)\b",
    "audits": r"\baudit(?:s|ed|ors?)?\b",
    "lost": r"\b(?:recompute|preempt)\w*\b[^.]*\blost\b|\blost\b[^.]*\b(?:recompute|preempt)",
    "go on": r"\bgo(?:es)? on\b(?! (?:a|an|the|in)\b)",
    "come back": r"\bcomes? back\b|\bcame back\b",
    "yield": r"\byields?\b",
    "costs": r"\b(?:the|step|token|measured) costs\b",
    "row": r"\brows?\b(?! of (?:a|the|its) (?:table|metrics)\b)",
    "bars": r"\bbars?\b",
    "tell": r"\btells?\b",
    "where": r"^Where [^?]*$|\bwhere (?:there (?:is|are)|none|not\b|needed|possible|allowed|known|they are allowed"
    r"|it (?:can|may|must|has|is (?:allowed|needed|faster|known|possible))|transformers (?:has|does))",
}
# What a text must hold, in small letters, for a pattern to be tried: most texts hold none.
HINTS = {
    "weights of 4 bits": " bits",
    "products with 4 bits": " bits",
    "ms a token": " a ",
    "a second": " a",
    "a request": " a",
    "most": "the most ",
    "sums of ranks": "sum",
    "audits": "audit",
    "go on": " on",
    "come back": " back",
}
WIRE = ("engine/wire/", "engine/bus_thread", "engine/loop", "service/delivery/", "tests/wire/")
TENSORS = ("csrc/", "engine/executor/", "loadtest/kernels/", "tests/kernels/", "tests/executor/", "docs/notes/kernels/")
# Words that stand for something else outside of these folders.
FOLDERS = {
    "numbers": TENSORS,
    "piece": (
        "csrc/",
        "service/",
        "engine/core/",
        "engine/wire/",
        "engine/executor/",
        "docs/",
        "README.md",
        "loadtest/",
    ),
    "tail": WIRE,
    "exchange": WIRE,
    "mirror": ("engine/executor/", "tests/executor/"),
    "calibration": ("engine/core/", "engine/observers/", "service/"),
    "costs": ("engine/core/", "engine/observers/"),
    "row": ("engine/core/",),
    "yield": ("engine/core/",),
    "bars": ("loadtest/",),
    "manifest": ("engine/",),
    "figures": ("engine/observers/",),
    "rung": ("csrc/", "engine/executor/", "tests/executor/"),
    "ladder": ("csrc/", "engine/executor/", "tests/executor/"),
}
DANGLING = "trailing comment without a noun"  # begins with of, that, which or whose
ROOMS = (
    "engine/common",
    "engine/core",
    "engine/executor",
    "engine/tools",
    "engine/wire",
    "tests/kernels",
    "docs/notes",
)
TEXTS = ("service/", "engine/", "loadtest/")  # folders whose strings are options, log lines and errors
CODE = (".py", ".cpp", ".h", ".cu", ".cuh", ".lua")
PAGES_OF_WORDS = ("CHANGELOG.md", "CONTRIBUTING.md", "docs/models.md", "docs/options.md")  # the glossary; derived
DIRECTIVES = re.compile(r"^(noqa|type:|mypy:|ruff:|pragma|fmt:|!)|^-*\s*$|^[-=*]{3,}")
DRAWING = re.compile(r"[|`+<>─│└├┌┐┘┴┬]{2,}|-{2,}>|\s{3,}\S")


class Text(NamedTuple):
    line: int
    text: str
    behind: bool = False  # a comment behind code


class Violation(NamedTuple):
    line: int
    word: str
    sentence: str


def glossary() -> list[str]:
    """The right column of the glossary: words not to be used."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.split("### Glossary")[1].split("\n\n")[2]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [word.strip() for row in rows for word in row[1].split(",")]


def pattern(word: str) -> re.Pattern[str]:
    return re.compile(RULES.get(word, rf"\b{re.escape(word)}\b"), re.IGNORECASE if word != "where" else 0)


def has_words(value: object) -> bool:
    return isinstance(value, str) and len(re.findall(r"[A-Za-z]{2,} ", value)) >= 3


def python_prose(text: str, strings: bool = False) -> Iterator[Text]:
    """Docstrings, runs of comment lines and, if asked for, strings of at least four words."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):  # breadth first, so a docstring's owner is before it
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
                yield Text(node.body[0].lineno, docstring)
        elif strings and isinstance(node, ast.Constant) and id(node) not in docstrings and has_words(node.value):
            yield Text(node.lineno, str(node.value))
    yield from joined(
        (
            token.start[0],
            token.start[1],
            token.string.lstrip("#").removeprefix(" "),
            bool(token.line[: token.start[1]].strip()),
        )
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    )


def cpp_prose(text: str, mark: str = "//") -> Iterator[Text]:
    """Runs of comments after `mark`."""
    comments = []
    for number, line in enumerate(text.splitlines(), 1):
        at = line.find(mark)
        if at >= 0 and (at == 0 or line[at - 1] != ":"):
            comments.append((number, at, line[at + 2 :].removeprefix(" "), bool(line[:at].strip())))
    yield from joined(iter(comments))


def page_prose(text: str) -> Iterator[Text]:
    """Paragraphs of a Markdown page, without code."""
    text = re.sub(r"^(```|~~~).*?^\1", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *\|.*", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n(?= *(?:[*-]|\d+\.) )", "\n\n", text)
    at = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        yield Text(at, re.sub(r"^ *(?:[*#-]+|\d+\.) |^ +", "", paragraph, flags=re.MULTILINE))
        at += paragraph.count("\n")


def joined(comments: Iterator[tuple[int, int, str, bool]]) -> Iterator[Text]:
    """Comments on consecutive lines and in one column are one text.  Takes (line, column, text, is it behind code?)."""
    lines: list[str] = []
    before, begin, trailing = (-2, -1), 0, False
    for number, column, text, behind in comments:
        if lines and (behind or (number, column) != (before[0] + 1, before[1])):
            yield Text(begin, "\n".join(lines), trailing)
            lines = []
        if not DIRECTIVES.match(text):
            if not lines:
                begin, trailing = number, behind
            lines.append(text)
        before = (number, column)
    if lines:
        yield Text(begin, "\n".join(lines), trailing)


def sentences(text: str) -> Iterator[str]:
    """The sentences of one text."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if not line.startswith("  ") and not DRAWING.search(line)]
        run = " ".join(" ".join(lines).split())
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`\"(])", run):
            if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= 2:
                yield sentence


def texts(name: str, source: str) -> Iterator[Text]:
    """All prose of one file."""
    if name.endswith(".md"):
        return page_prose(source)
    if name.endswith(".py"):
        return python_prose(source, name.startswith(TEXTS))
    return cpp_prose(source, "--" if name.endswith(".lua") else "//")


def violations(name: str, prose: list[Text], words: dict[str, re.Pattern[str]]) -> Iterator[Violation]:
    """Every word of `words` in the prose of file `name`, in the sense that the glossary replaces."""
    here = {word: sought for word, sought in words.items() if name.startswith(FOLDERS.get(word, ("",)))}
    hints = {word: HINTS.get(word, word.lower()) for word in here}
    for text in prose:
        lower = text.text.lower().replace("\n", " ")
        tried = {word: sought for word, sought in here.items() if hints[word] in lower}
        if text.behind and re.match(r"(?:of|that|which|whose)\b", text.text):
            yield Violation(text.line, DANGLING, text.text)
        for sentence in sentences(text.text) if tried else ():
            bare = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "code", sentence)
            for word, sought in tried.items():
                if word == "piece" and "SentencePiece" in sentence:
                    continue
                for _ in sought.findall(bare):
                    yield Violation(text.line, word, sentence)


def folder(name: str) -> str:
    parts = name.split("/")
    room = next((room for room in ROOMS if name.startswith(f"{room}/")), None)
    if room is None and parts[0] == "service" and len(parts) > 2:
        room = "/".join(parts[:2])
    return room or (parts[0] if len(parts) > 1 else ".")


def files(folders: list[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of each file with prose that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in sorted(set(listed.stdout.splitlines())):
        path = ROOT / name
        if path.suffix not in (*CODE, ".md") or not path.is_file() or path.is_symlink() or name in PAGES_OF_WORDS:
            continue
        if not name.startswith("quire/") and (not folders or name.startswith(tuple(folders))):
            yield name, path.read_text(encoding="utf-8")


def limits() -> dict[str, int]:
    found: dict[str, int] = tomllib.loads(LIMITS.read_text(encoding="utf-8"))["violations"]
    return found


def write(counts: dict[str, int]) -> str:
    """Write the present counts as limits; return an error if their total is above that of the old limits."""
    total, old = sum(counts.values()), sum(limits().values()) if LIMITS.exists() else None
    if old is not None and total > old:
        return f"{total} violations, {old} allowed: the total may only shrink"
    head = "# Violations of the glossary per folder.  They may only shrink: python .ci/prose.py --write\n[violations]\n"
    rows = [f'"{name}" = {count}\n' for name, count in sorted(counts.items()) if count]
    LIMITS.write_text(head + "".join(rows), encoding="utf-8")
    return ""


def over(counts: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """A line per folder that has more violations than allowed."""
    return [
        f"{name}: {count} words of CONTRIBUTING.md's glossary, {allowed.get(name, 0)} allowed. "
        f"`python .ci/prose.py --lines {'' if name == '.' else name}` lists them; after a move: --write"
        for name, count in sorted(counts.items())
        if count > allowed.get(name, 0)
    ]


def report(sizes: dict[str, list[int]], found: dict[str, Counter[str]], words: bool) -> None:
    print(f"{'folder':24}{'sentences':>10}{'median':>8}{'p95':>6}{'over 25':>9}{'glossary':>10}")
    sizes = {**sizes, "all": [size for folder_sizes in sizes.values() for size in folder_sizes]}
    found = {**found, "all": sum(found.values(), Counter())}
    for room, lengths in sizes.items():
        if lengths:
            p95 = sorted(lengths)[min(len(lengths) - 1, len(lengths) * 95 // 100)]
            long = sum(size > 25 for size in lengths)
            print(
                f"{room:24}{len(lengths):>10}{statistics.median(lengths):>8g}{p95:>6}{long:>9}{found[room].total():>10}"
            )
        if words and found[room]:
            print("    " + ", ".join(f"{word} {count}" for word, count in found[room].most_common()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Count words of the glossary's wrong column.")
    parser.add_argument("--words", action="store_true", help="print which words were found in each folder")
    parser.add_argument("--lines", action="store_true", help="print each violation as file:line: word: sentence")
    parser.add_argument("--check", action="store_true", help="fail if a folder is above its limit")
    parser.add_argument("--write", action="store_true", help="lower the limits to the present counts")
    parser.add_argument("folders", nargs="*", help="only these")
    options = parser.parse_args()
    words = {word: pattern(word) for word in [*glossary(), *ALSO]}
    sizes: dict[str, list[int]] = {}
    found: dict[str, Counter[str]] = {}
    for name, source in files(options.folders):
        counts, prose = found.setdefault(folder(name), Counter()), list(texts(name, source))
        for violation in violations(name, prose, words):
            counts[violation.word] += 1
            if options.lines:
                print(f"{name}:{violation.line}: {violation.word}: {violation.sentence}")
        if not options.check:
            every = (sentence for text in prose for sentence in sentences(text.text))
            sizes.setdefault(folder(name), []).extend(len(sentence.split()) for sentence in every)
    totals = {name: counts.total() for name, counts in found.items()}
    if options.check or options.write:
        wrong = [write(totals)] if options.write else over(totals, limits())
        print("\n".join(line for line in wrong if line), end="\n" if any(wrong) else "")
        return int(any(wrong))
    report(sizes, found, options.words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
