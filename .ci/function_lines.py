"""Check that functions stay short: at most 60 lines of Python, at most 120 lines of C++ and CUDA.

    python .ci/function_lines.py          prints functions that are too long and exits with 1
    python .ci/function_lines.py --all    prints every function over the bound, exceptions included, longest first

Lines are counted from `def`, or the first line of a C++ signature, to the last line of the body. Docstrings and
comments count. A function inside another one counts for both.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHON_LINES, KERNEL_LINES = 60, 120
MAX_EXCEPTIONS = 10
# "path:name" of functions that may be longer. Shorten this list; do not add to it.
EXCEPTIONS = frozenset(
    [
        "csrc/cuda/attention/prefill_plan.cu:plan_kernel",
        "tests/service/delivery/test_ledger.py:test_after_500_random_departures_the_books_balance",
        "tests/wire/test_bus_model.py:BusModel.talk",
    ]
)

_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/                      # comments
    |R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"         # raw strings
    |"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'     # strings and characters
    |^[ \t]*\#(?:\\\n|[^\n])*                   # preprocessor lines
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_SCOPE = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b")
_NAME = re.compile(r"([A-Za-z_~][\w:~]*|operator\s*[^\s(]+)\s*\(")


class Function(NamedTuple):
    path: str
    name: str
    line: int
    lines: int
    limit: int

    @property
    def key(self) -> str:
        return f"{self.path}:{self.name}"


def python_functions(path: str, text: str) -> list[Function]:
    """Every function and method of a Python file, with its qualified name."""
    found: list[Function] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                assert child.end_lineno is not None
                name = prefix + child.name
                found.append(Function(path, name, child.lineno, child.end_lineno - child.lineno + 1, PYTHON_LINES))
                inner = f"{name}."
            elif isinstance(child, ast.ClassDef):
                inner = f"{prefix}{child.name}."
            walk(child, inner)

    walk(ast.parse(text), "")
    return found


def cpp_functions(path: str, text: str) -> list[Function]:
    """Every function body outside other functions; a function is a `{` after a `)` that opens no class or namespace."""
    # Comments and strings become spaces of the same shape, so that offsets and lines stay.
    code = _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    found, at = [], 0
    statement = 0  # where the statement that may be a signature begins
    while at < len(code):
        char = code[at]
        if char in ";}":
            statement = at + 1
        elif char == "{":
            head = code[statement:at]
            if ")" in head and not _SCOPE.search(re.sub(r"template\s*<.*?>(?=\s*\w)|\(.*", "", head, flags=re.DOTALL)):
                end = _matching(code, at)
                first = statement + len(head) - len(head.lstrip())
                bare = re.sub(r"__launch_bounds__\s*\([^)]*\)|template\s*<.*?>", "", head, flags=re.DOTALL)
                name = _NAME.search(bare)
                line = code.count("\n", 0, first) + 1
                lines = code.count("\n", first, end) + 1
                found.append(Function(path, name[1] if name else "?", line, lines, KERNEL_LINES))
                at = end
            statement = at + 1
        at += 1
    return found


def _matching(code: str, at: int) -> int:
    """The offset of the brace that closes the one at `at`."""
    depth = 0
    for end in range(at, len(code)):
        depth += (code[end] == "{") - (code[end] == "}")
        if not depth:
            return end
    return len(code) - 1


def functions() -> list[Function]:
    """Every function of every file that git tracks, or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for name in sorted(set(names)):
        path = ROOT / name
        if path.suffix not in (".py", ".cpp", ".h", ".cu", ".cuh") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        found += python_functions(name, text) if path.suffix == ".py" else cpp_functions(name, text)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that functions stay short.")
    parser.add_argument("--all", action="store_true", help="print exceptions as well")
    everything = parser.parse_args().all
    found = functions()
    long = sorted((one for one in found if one.lines > one.limit), key=lambda one: -one.lines)
    for one in long:
        if everything or one.key not in EXCEPTIONS:
            print(f"{one.path}:{one.line}: {one.name} has {one.lines} lines, the limit is {one.limit}")
    stale = sorted(EXCEPTIONS - {one.key for one in long})
    for key in stale:
        print(f"{key} is an exception and needs none: remove it from .ci/function_lines.py")
    if len(EXCEPTIONS) > MAX_EXCEPTIONS:
        print(f"{len(EXCEPTIONS)} exceptions; {MAX_EXCEPTIONS} is the aim", file=sys.stderr)
    return int(bool(stale) or any(one.key not in EXCEPTIONS for one in long))


if __name__ == "__main__":
    sys.exit(main())
