"""The page, and the verdict."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest.report import ResultError, judge, load, page, same_work
from quire.loadtest.stats import Attempt, Record, Sample, Slo, series, summarise
from quire.loadtest.svg import Bars, Line, chart, decades, ticks

ROOT = Path(__file__).resolve().parents[2]
WINDOWS = {"base": (0.0, 10.0), "burst": (10.0, 20.0), "after": (20.0, 30.0)}


def result(slowness: float = 1.0, preemptions: float = 0.0) -> dict[str, Any]:
    records = []
    for i in range(60):
        due = i / 2
        times = [due + 0.1 * slowness + n * 0.01 * slowness for n in range(20)]
        records.append(Record(due, "x", 10, 20, 0.0, [Attempt(due, 200)], times, times[-1], 20, "ok"))
    samples = [
        Sample(float(i), min(1.0, i / 20), i % 5, i % 3, preemptions * i, filled=0.96 if i else None, eta=0.5)
        for i in range(31)
    ]
    work = {"workload": "sharegpt", "phases": [["base", 5, 10]], "burstiness": 1.0, "scale": 1.0, "seed": 0}
    return {
        "kind": "replay",
        "command": "python -m quire.loadtest replay <url>",
        "commit": "abc",
        "time": "now",
        "cpu": "cpu",
        "cores": 2,
        "python": "3.11",
        "note": "<script>alert(1)</script>",
        "config": {"url": "http://x", "model": "a & b", "work": work, "retry": "obey"},
        "windows": WINDOWS,
        "figures": summarise(records, samples, Slo(), WINDOWS),
        "series": series(records, samples, Slo()),
    }


def worse(a: dict[str, Any], b: dict[str, Any], tolerance: float = 0.1) -> set[str]:
    return {row.figure.name for row in judge([a, b], tolerance) if row.worse}


def test_page_of_one_and_of_two() -> None:
    one, two = page([result()], 0.1), page([result(), result(2.0, 1.0)], 0.1)
    for html, plots in ((one, 7), (two, 8)):
        svgs = [part.split("</svg>")[0] for part in html.split("<svg")[1:]]
        assert len(svgs) == plots
        for svg in svgs:
            ET.fromstring(f"<svg{svg}</svg>")
        assert "<script" not in html
        assert "&lt;script&gt;" in html
        assert "a &amp; b" in html
        assert "NaN" not in html
        assert "inf" not in html
    assert "B is worse than A by more than 10%" in two
    assert "nowhere worse" in page([result(), result()], 0.1)


def test_the_page_shows_filled_slots_and_eta_over_time() -> None:
    made = result()
    assert (made["figures"]["server"]["slots_filled_mean"], made["figures"]["server"]["eta_mean"]) == (0.96, 0.5)
    assert made["series"]["samples"]["filled"][:2] == [None, 0.96]
    html = page([made], 0.1)
    assert "eta: blocks held of those that static allocation would hold" in html
    assert "<td>slots that hold a token, mean</td><td>96.0%</td>" in html
    for name in ("filled", "eta"):  # a result of an earlier version
        del made["series"]["samples"][name]
    for name in ("slots_filled_mean", "eta_mean"):
        del made["figures"]["server"][name]
    assert "slots that hold a token, mean" not in page([made], 0.1)


def test_what_is_worse() -> None:
    assert worse(result(), result()) == set()
    slow = worse(result(), result(2.0))
    assert {"TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "end to end p50"} <= slow
    assert "goodput" not in slow
    assert worse(result(2.0), result()) == set()
    assert worse(result(), result(1.05)) == set()
    assert "TTFT p50" in worse(result(), result(1.05), 0.01)
    assert worse(result(), result(preemptions=1.0)) == {"preemptions"}


def test_a_figure_that_one_lacks_is_shown_and_not_judged() -> None:
    a, b = result(), result()
    b["figures"]["server"] = {}
    assert worse(a, b) == worse(b, a) == set()
    assert any(row.figure.name == "preemptions" and row.values == [0.0, None] for row in judge([a, b], 0.1))
    page([a, b], 0.1)


def test_what_cannot_be_compared() -> None:
    a, b = result(), result()
    b["config"]["work"]["seed"] = 9
    same_work(a, b)
    b["config"]["work"]["burstiness"] = 0.5
    with pytest.raises(ResultError, match=r"not the same work: burstiness is 1.0 in A, 0.5 in B"):
        same_work(a, b)
    c = copy.deepcopy(a)
    c["figures"]["goodput"]["slo_ttft_s"] = 1.0
    with pytest.raises(ResultError, match=r"not the same goal: slo_ttft_s is 2.0 in A, 1.0 in B"):
        same_work(a, c)


def test_what_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for text, says in (("{", "not JSON"), ("[]", "config is missing"), ('{"config": {}}', "windows is missing")):
        path.write_text(text)
        with pytest.raises(ResultError, match=says):
            load(path)


def test_exit_status(tmp_path: Path) -> None:
    other = result()
    other["config"]["work"]["workload"] = "alpaca"
    for name, made in {"a": result(), "b": result(2.0), "c": other}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(made))

    def report(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "quire.loadtest", "report", *words, "--out", str(tmp_path / "r.html")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    a, b, c = (str(tmp_path / f"{name}.json") for name in "abc")
    assert report(a)[0] == 0
    assert report(a, a)[0] == 0
    status, said = report(a, b)
    assert (status, "worse" in said) == (1, True)
    assert report(a, b, "--tolerance", "5")[0] == 0
    status, said = report(a, c)
    assert (status, said) == (2, "not the same work: workload is sharegpt in A, alpaca in B\n")
    assert report(str(tmp_path / "none.json"))[0] == 2
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


@given(st.floats(0, 1e9), st.floats(1e-9, 1e9), st.integers(3, 9))
def test_ticks_are_few_and_reach_both_ends(low: float, span: float, most: int) -> None:
    if low + span == low:
        return
    made = ticks(low, low + span, most)
    assert 2 <= len(made) <= most + 3
    assert made[0] <= low * (1 + 1e-9) + 1e-9 * span
    assert made[-1] >= (low + span) * (1 - 1e-9)
    assert all(a < b for a, b in itertools.pairwise(made))


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_decades_hold_their_values(a: float, b: float) -> None:
    made = decades(min(a, b), max(a, b))
    assert made[0] <= min(a, b) * 1.001
    assert made[-1] >= max(a, b) * 0.999


@given(st.lists(st.none() | st.floats(0, 1e7), max_size=30), st.booleans())
def test_a_chart_of_anything_is_well_formed(ys: list[float | None], log: bool) -> None:
    xs = [float(i) for i in range(len(ys))]
    drawn = chart("<a>", [Line("x < y", "a", xs, ys)], {"burst": (0.0, 3.0)}, log=log)
    ET.fromstring(drawn)
    assert "nan" not in drawn
    heights = [abs(y or 0.0) for y in ys]
    ET.fromstring(chart("b", [Bars(1.0, xs, [("one", "good", heights), ("two", "late", heights)])], {}))
