"""The plots, and the verdict."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.loadtest.__main__ import main
from quire.loadtest.report import OUTCOMES, ResultError, draw, judge, load, same_work, verdict
from quire.loadtest.stats import Attempt, Record, Sample, Slo, series, summarise

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


def drawn(results: list[dict[str, Any]], folder: Path) -> str:
    """Draw results as SVG; texts stand in it as comments."""
    draw(results, folder / "r.svg")
    return (folder / "r.svg").read_text()


def test_plots_of_one_and_of_two(tmp_path: Path) -> None:
    one, two = drawn([result()], tmp_path), drawn([result(), result(2.0, 1.0)], tmp_path)
    for text, count in ((one, 7), (two, 8)):
        assert len(set(re.findall(r'<g id="axes_\d+">', text))) == count
        for title in ("Time to first token, ms", "KV cache in use, %", "eta: blocks held", *OUTCOMES.values()):
            assert title in text
    assert "sharegpt, base 5/s for 10 s: a &amp; b" in one
    assert "A p99" in two
    assert "B p99" in two
    rows = judge([result(), result(2.0, 1.0)], 0.1)
    assert verdict(rows, 0.1).startswith("B is worse than A by more than 10%: TTFT p50, ")
    assert "nowhere worse" in verdict(judge([result(), result()], 0.1), 0.1)


def test_a_result_without_measurements_or_of_an_earlier_version_is_drawn(tmp_path: Path) -> None:
    made = result()
    assert (made["figures"]["server"]["slots_filled_mean"], made["figures"]["server"]["eta_mean"]) == (0.96, 0.5)
    assert made["series"]["samples"]["filled"][:2] == [None, 0.96]
    for name in ("filled", "eta"):
        del made["series"]["samples"][name]
    for name, values in made["series"]["samples"].items():
        made["series"]["samples"][name] = [None for _ in values] if name != "t" else values
    for name in ("ttft_p50", "ttft_p99"):
        made["series"][name] = [None for _ in made["series"]["t"]]
    assert "Requests in the server" in drawn([made], tmp_path)


def test_what_is_worse() -> None:
    assert worse(result(), result()) == set()
    slow = worse(result(), result(2.0))
    assert {"TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "end to end p50"} <= slow
    assert "goodput" not in slow
    assert worse(result(2.0), result()) == set()
    assert worse(result(), result(1.05)) == set()
    assert "TTFT p50" in worse(result(), result(1.05), 0.01)
    assert worse(result(), result(preemptions=1.0)) == {"preemptions"}


def test_a_figure_that_one_lacks_is_shown_and_not_judged(tmp_path: Path) -> None:
    a, b = result(), result()
    b["figures"]["server"] = {}
    assert worse(a, b) == worse(b, a) == set()
    assert any(row.figure.name == "preemptions" and row.values == [0.0, None] for row in judge([a, b], 0.1))
    draw([a, b], tmp_path / "r.png")


def test_what_cannot_be_compared() -> None:
    a, b = result(), result()
    b["config"]["work"]["seed"] = 9
    same_work(a, b)
    b["config"]["work"]["burstiness"] = 0.5
    with pytest.raises(ResultError, match=r"not the same work: burstiness is 1.0 in A, 0.5 in B"):
        same_work(a, b)
    c = copy.deepcopy(a)
    c["figures"]["goodput"]["slo_ttft_s"] = 1.0
    with pytest.raises(ResultError, match=r"not the same target: slo_ttft_s is 2.0 in A, 1.0 in B"):
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
            [sys.executable, "-m", "quire.loadtest", "report", *words, "--out", str(tmp_path / "r.png")],
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
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_drawn_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(result()))
    assert main(["report", str(tmp_path / "a.json"), "--out", str(tmp_path / "r.html")]) == 2
    assert f"cannot draw {tmp_path / 'r.html'}: " in capsys.readouterr().err


def test_without_matplotlib_the_figures_are_printed_and_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(result()))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(tmp_path / "a.json"), "--out", str(tmp_path / "r.png")]) == 2
    said = capsys.readouterr()
    assert "TTFT p50" in said.out
    assert "quire[report]" in said.err
