"""Pages show the values of their result files, to the digit, and no number without a file."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.loadtest import figures, machine, remeasure
from quire.loadtest.pages import Results, facts, v

ROOT = Path(__file__).resolve().parents[2]


def test_pages_agree_with_their_result_files() -> None:
    texts, errors = figures.compare_pages(ROOT, machine.RESULTS)
    assert errors == [], "python -m quire.loadtest figures rewrites the pages"
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text


def tables(text: str) -> list[list[str]]:
    """The rows with numbers of each table of a page, except the table of result files."""
    found: list[list[str]] = [[]]
    for line in figures.UNREAD.sub(lambda match: re.sub(r"\S", " ", match.group()), text).splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    kept = [[row for row in rows if figures.NUMBER.search(row)] for rows in found]
    return [rows for rows in kept if rows]


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.PAGE)
def test_a_wrong_digit_in_any_table_is_found(page: ModuleType) -> None:
    """In each table a digit of a number in three rows, drawn by seed, is another."""
    rng, results = random.Random(42), Results(machine.RESULTS)
    text, lines = (ROOT / page.PAGE).read_text(encoding="utf-8"), list(page.lines(results))
    assert figures.compare(text, lines, page.FACTS).errors == []
    read = figures.UNREAD.sub(lambda match: re.sub(r"\S", " ", match.group()), text)
    planted = 0
    for row in (row for rows in tables(text) for row in rng.sample(rows, min(3, len(rows)))):
        number = rng.choice(list(figures.NUMBER.finditer(row)))
        at = read.index(row) + rng.choice([at for at in range(*number.span()) if row[at].isdigit()])
        wrong = text[:at] + str((int(text[at]) + rng.randint(1, 9)) % 10) + text[at + 1 :]
        assert figures.compare(wrong, lines, page.FACTS).errors, f"{row}: {wrong[at - 9 : at + 9]!r}"
        planted += 1
    assert planted >= 1


LINE = f"| tokens/s | **{v(1234.4, ',.0f')}** | {v(0.5, '.2f')} |"


def test_a_wrong_digit_is_found_and_rewritten() -> None:
    page = "# Speed\n\n| tokens/s | **1,235** | 0.50 |\n"
    done = figures.compare(page, [LINE], [])
    assert done.errors == ["the page says: | tokens/s | **1,235** | 0.50 |; the file: | tokens/s | **1,234** | 0.50 |"]
    assert done.text == page.replace("1,235", "1,234")
    assert figures.compare(done.text, [LINE], []).errors == []


def test_lines_of_a_page_may_break_anywhere() -> None:
    line = f"It takes {v(2.04, '.1f')} ms with 32 rows."
    assert figures.compare("It takes\n2.0 ms with\n32 rows.\n", [line], []).errors == []


def test_a_text_that_is_gone_or_stands_twice_is_an_error() -> None:
    assert figures.compare("nothing", [LINE], []).errors == [
        "the page has 0 texts like: | tokens/s | **1,234** | 0.50 |"
    ]
    twice = "| tokens/s | **1** | 2 |\n| tokens/s | **3** | 4 |\n"
    assert figures.compare(twice, [LINE], []).errors[0].startswith("the page has 2 texts like")


@pytest.mark.parametrize(
    ("page", "number"),
    [
        ("A request takes 12 ms.", "12"),
        ("| a | 1,500 |", "1,500"),
        ("It is 1.57 times as fast.", "1.57"),
        ("About 95 % arrive.", "95"),
        ("(0.9 of it)", "0.9"),
    ],
)
def test_a_number_without_a_file_is_an_error(page: str, number: str) -> None:
    (error,) = figures.compare(page, [], []).errors
    assert f"line 1: {number} is in no result file" in error


@pytest.mark.parametrize(
    "page",
    [
        "The 8B shape on an H200 with int8, a 42M model, x86-64-v3.",
        "`--rate 28` and [a link](https://host/1/2.html)",
        "```\n12 ms\n```",
        "1. first\n2. second",
        "Python 3.11.7 of issue #12",
    ],
)
def test_names_code_and_links_are_no_measurements(page: str) -> None:
    assert figures.compare(page, [], []).errors == []


def test_a_fact_covers_its_own_number_only_and_must_be_on_the_page() -> None:
    assert figures.compare("blocks of 16 tokens", [], ["blocks of # tokens"]).errors == []
    errors = figures.compare("blocks of 16 tokens in 3 ms", [], ["blocks of # tokens"]).errors
    assert len(errors) == 1
    assert "3 is in no result file" in errors[0]
    assert figures.compare("blocks", [], ["groups of #"]).errors == [
        "FACTS has a text that the page lacks: groups of #"
    ]


@pytest.mark.parametrize("name", ["readme", "benchmarks", "scaling", "quantisation", "locality"])
def test_facts_stand_once(name: str) -> None:
    found = facts(name)
    assert len(found) == len(set(found))


GOOD = {"command": "python -m x", "commit": "d0c58ce9", "cpu": "Xeon", "cores": 2, "time": "2026-11-27T06:00:00Z"}


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({"commit": "d0c58ce9-dirty"}, "uncommitted changes"),
        ({"commit": ""}, "no commit"),
        ({"command": ""}, "no command"),
        ({"cpu": None, "cores": None}, "no machine"),
    ],
)
def test_a_result_needs_its_origin(change: dict[str, Any], lacks: str) -> None:
    assert figures.origin("x", GOOD)[1] == []
    (wrong,) = figures.origin("x", GOOD | change)[1]
    assert lacks in wrong


def test_the_table_of_sources_names_commit_date_and_machine(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(GOOD), encoding="utf-8")
    results = Results(tmp_path)
    assert results["x"] == GOOD
    table, wrong = figures.sources(results)
    assert "| `x.json` | 2026-11-27 | d0c58ce9 | 2 cores of Xeon |" in table
    assert wrong == []


def test_a_changed_result_does_not_make_the_tree_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        mail = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", *mail, *words], cwd=tmp_path, check=True, capture_output=True)

    result, code = tmp_path / "loadtest" / "results" / "x.json", tmp_path / "x.py"
    result.parent.mkdir(parents=True)
    for path in (result, code):
        path.write_text("1", encoding="utf-8")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    clean = machine.commit()
    assert not clean.endswith("-dirty")
    result.write_text("2", encoding="utf-8")
    assert machine.commit() == clean
    code.write_text("2", encoding="utf-8")
    assert machine.commit() == f"{clean}-dirty"


def test_each_measurement_is_a_result_that_a_page_uses() -> None:
    results = Results(machine.RESULTS)
    for module in figures.PAGES:
        list(module.lines(results))
    again = {one.name for one in remeasure.ALL}
    assert again <= results.used.keys()
    assert sum(one.minutes for one in remeasure.ALL if one.device == "cpu") <= 120
    assert sum(one.minutes for one in remeasure.ALL if one.device == "cuda") <= 30
