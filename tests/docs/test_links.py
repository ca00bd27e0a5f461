"""Every relative link of every page leads to a file of the repository, and every anchor to a heading."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
README_LINES = 130
COLUMNS = 6  # most columns of a table


def pages() -> list[Path]:
    """Every Markdown file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.split("\n") if listed.returncode == 0 else []
    # A copy without .git, such as a source archive, is searched by folder.
    found = [ROOT / name for name in names if name] or [
        path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]
    return sorted(path for path in found if path.is_file())


def prose(path: Path) -> str:
    """A page without code blocks and code spans: brackets there are not links."""
    text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return frozenset(names)


def broken(path: Path) -> list[str]:
    wrong = []
    for target in LINK.findall(prose(path)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        to = (path.parent / name).resolve() if name else path
        if not to.exists() or not to.is_relative_to(ROOT):
            wrong.append(f"{target}: no such file")
        elif anchor and (to.suffix != ".md" or anchor not in anchors(to)):
            wrong.append(f"{target}: no such heading")
    return wrong


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    assert broken(path) == []


def test_a_broken_link_or_anchor_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# A heading, with `code`\n## Twice\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[ok](other.md#a-heading-with-code) [ok](other.md#twice-1) [web](https://example.com/x) `[no](link)`\n"
        "```\n[no](link)\n```\n[gone](missing.md) [anchor](other.md#missing)\n"
    )
    assert broken(page) == ["missing.md: no such file", "other.md#missing: no such heading"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md", "docs/api.md", "docs/operations.md"])
def test_tables_have_few_columns(name: str) -> None:
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            assert len(re.split(r"(?<!\\)\|", line)) - 2 <= COLUMNS, line


def test_every_figure_of_speed_in_the_readme_is_in_the_benchmarks() -> None:
    """A figure that is repeated must not drift from the page that has its machine and its command."""
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = readme.split("## Results")[1].split("\n## ")[0]
    rows = [line for line in results.splitlines() if line.startswith("|")][2:]
    assert 1 <= len(rows) <= 8
    for row in rows:
        figures = " ".join(re.split(r"(?<!\\)\|", row)[2:4])
        for figure in re.findall(r"\d[\d,.]*\d|\d", figures):
            assert figure in benchmarks, f"{figure} of '{row}'"
