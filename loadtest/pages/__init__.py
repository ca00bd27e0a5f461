"""The measured values of each page, one module per page.

A module has `PAGE`, the page's path; `lines(results)`, which yields texts of the page with values from result files; and
`FACTS`, texts of the page whose numbers are settings, formats or limits, not measurements: the lines of facts/NAME.txt,
in which `#` stands for any number.
`python -m quire.loadtest figures` compares and rewrites the pages.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

OPEN, CLOSE = "\ue000", "\ue001"  # around a measured value; characters of the private use area, so no page has them


def v(value: float, form: str = "") -> str:
    """Return a measured value as a page shows it, in a format of str.format, marked as measured."""
    return f"{OPEN}{value:{form}}{CLOSE}"


def pct(share: float, digits: int = 1) -> str:
    """Return a share between 0 and 1 in per cent, marked as measured."""
    return v(100 * share, f".{digits}f")


def facts(name: str) -> list[str]:
    """Return the lines of facts/NAME.txt."""
    path = Path(__file__).parent / "facts" / f"{name}.txt"
    return path.read_text(encoding="utf-8").splitlines()


class Results:
    """Reads result files and records which ones a page has used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return loadtest/results/NAME.json."""
        if name not in self.used:
            self.used[name] = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        return self.used[name]

    @cached_property
    def names(self) -> list[str]:
        """Names of all result files."""
        return sorted(str(path.relative_to(self.folder).with_suffix("")) for path in self.folder.rglob("*.json"))
