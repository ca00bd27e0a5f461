"""Plots and measurements of one or two replay results, and whether the second is worse than the first.

    python -m quire.loadtest report A.json [B.json] [--out report.png] [--tolerance 0.1]

Prints the measurements, and draws the plots with matplotlib (`pip install 'quire[report]'`) into a png, svg or pdf
file.  Exit status: 0; 1 if B is worse than A; 2 if they cannot be compared or drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ResultError(ValueError):
    """A file is not a result, or two results cannot be compared.  Names the file and the field."""


@dataclass(frozen=True)
class Judged:
    """A measurement in the table, and how it is judged."""

    name: str
    path: str  # dotted path into the results
    unit: str  # ms (stored in seconds), %, or text printed after the number
    better: int  # 1: more is better, -1: less is better, 0: not judged
    noise: float  # largest difference that is ignored, in the stored unit


JUDGED = (
    Judged("TTFT p50", "ttft_s.p50", "ms", -1, 0.002),
    Judged("TTFT p99", "ttft_s.p99", "ms", -1, 0.005),
    Judged("ITL p50", "itl_s.p50", "ms", -1, 0.001),
    Judged("ITL p99", "itl_s.p99", "ms", -1, 0.002),
    Judged("ITL p99 in the burst", "phases.burst.itl_s.p99", "ms", -1, 0.002),
    Judged("end to end p50", "e2e_s.p50", "ms", -1, 0.005),
    Judged("end to end p99", "e2e_s.p99", "ms", -1, 0.010),
    Judged("goodput", "goodput.fraction", "%", 1, 0.005),
    Judged("tokens out", "output_tokens_per_s", "/s", 1, 0.0),
    Judged("failed", "failed", "", -1, 0.0),
    Judged("preemptions", "server.preemptions", "", -1, 0.0),
    Judged("first retry admitted", "refusals.first_retry_success", "%", 1, 0.01),
    Judged("Retry-After's error p50", "refusals.retry_after_error.p50", "%", -1, 0.02),
)
# Shown but not judged: more refusals or a fuller pool may be intended.
SHOWN = (
    Judged("requests", "requests", "", 0, 0),
    Judged("completed", "completed", "", 0, 0),
    Judged("refused for good", "refused_for_good", "", 0, 0),
    Judged("requests refused at least once", "refusals.requests_refused", "", 0, 0),
    Judged("attempts per success", "refusals.attempts_per_success", "", 0, 0),
    Judged("KV in use, mean", "server.kv_mean", "%", 0, 0),
    Judged("KV in use while requests wait, mean", "server.kv_mean_while_queueing", "%", 0, 0),
    Judged("slots that hold a token, mean", "server.slots_filled_mean", "%", 0, 0),
    Judged("eta: blocks held, of static allocation's, mean", "server.eta_mean", "%", 0, 0),
    Judged("recomputed tokens", "server.recomputed_tokens", "", 0, 0),
    Judged("recovery after the burst", "recovery_s", "s", 0, 0),
    Judged("send lag of the client p99", "send_lag_s.p99", "ms", 0, 0),
)


@dataclass(frozen=True)
class Row:
    figure: Judged
    values: list[float | None]
    worse: bool = False


def load(path: Path) -> dict[str, Any]:
    """Read a result of `replay`.  Raises ResultError, OSError."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResultError(f"{path}: not JSON: {error}") from None
    for field in ("config", "windows", "figures", "series"):
        if not isinstance(result, dict) or not isinstance(result.get(field), dict):
            raise ResultError(f"{path}: {field} is missing; is it a result of `python -m quire.loadtest replay`?")
    return result


def look_up(figures: dict[str, Any], path: str) -> float | None:
    value: Any = figures
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def same_work(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Raise ResultError if two results measured different work.  Seeds, and so token counts, may differ."""
    one, other = a["config"]["work"], b["config"]["work"]
    for field in ("workload", "phases", "burstiness", "scale", "context", "ask_tokens", "only"):
        if (one.get(field) or None) != (other.get(field) or None):
            raise ResultError(f"not the same work: {field} is {one.get(field)} in A, {other.get(field)} in B")
    for field in ("slo_ttft_s", "slo_mean_itl_s"):
        limit, given = a["figures"]["goodput"].get(field), b["figures"]["goodput"].get(field)
        if limit != given:
            raise ResultError(f"not the same target: {field} is {limit} in A, {given} in B")


def judge(results: Sequence[dict[str, Any]], tolerance: float) -> list[Row]:
    """Return a row for each measurement in any result.

    B is worse if its value is worse than that of A by more than `tolerance` (a fraction of A) and by more than noise.
    A measurement that one result lacks is not judged."""
    rows = []
    for figure in (*JUDGED, *SHOWN):
        values = [look_up(result["figures"], figure.path) for result in results]
        if all(value is None for value in values):
            continue
        worse = False
        if len(values) == 2 and figure.better:
            a, b = values
            if a is not None and b is not None:
                worse = (a - b) * figure.better > max(abs(a) * tolerance, figure.noise)
        rows.append(Row(figure, values, worse))
    return rows


def show(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "ms":
        return f"{value:,.2f} s" if value >= 1 else f"{value * 1000:,.1f} ms"
    if unit == "%":
        return f"{value:.1%}"
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
    return f"{text} {unit}".strip()


def change(row: Row) -> str:
    a, b = row.values
    if a is None or b is None:
        return ""
    if row.figure.unit == "%":
        return f"{(b - a) * 100:+.1f} points"
    if not a:
        return "" if a == b else f"{b - a:+g}"
    return f"x {b / a:,.0f}" if b >= 10 * a else f"{(b - a) / a:+.1%}"


# --------------------------------------------------------------------------------------------------------------- plots

OUTCOMES = {"good": "within the goal", "late": "late", "refused": "refused for good", "failed": "failed"}
COLOURS = {"good": "#2e9e6b", "late": "#e0a526", "refused": "#8a94a6", "failed": "#d03b3b"}
Pairs = Sequence[tuple[str, str]]  # (field of the series, label)


def verdict(rows: Sequence[Row], tolerance: float) -> str:
    """Return one sentence: whether B is worse than A, and in which measurements."""
    worse = [row.figure.name for row in rows if row.worse]
    if worse:
        return f"B is worse than A by more than {tolerance:.0%}: {', '.join(worse)}."
    return f"B is nowhere worse than A by more than {tolerance:.0%}."


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw one result, or two into the same plots.  The ending of `path` names the format: png, svg, pdf.

    Raises ImportError without matplotlib, ValueError for an unknown ending, OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = ["A", "B"] if len(results) == 2 else [""]
    figure = Figure(figsize=(14, 16 if len(results) == 1 else 20), layout="constrained")
    FigureCanvasAgg(figure)
    work = results[0]["config"]["work"]
    phases = ", ".join(f"{name} {rate:g}/s for {seconds:g} s" for name, rate, seconds in work["phases"])
    models = " and ".join(str(result["config"]["model"]) for result in results)
    figure.suptitle(f"{work['workload']}, {phases}: {models}", parse_math=False)
    axes = figure.subplots(3 + len(results), 2).flat
    plots = _Plots(names, results)
    plots.lines(next(axes), "Time to first token, ms", [("ttft_p99", "p99"), ("ttft_p50", "p50")], scale=1000, log=True)
    plots.lines(next(axes), "Time between tokens, ms", [("itl_p99", "p99"), ("itl_p50", "p50")], scale=1000, log=True)
    plots.samples(next(axes), "KV cache in use, %", [("kv", "in use")], scale=100)
    share = "Slots that hold a token, and eta: blocks held of those of static allocation, %"
    plots.samples(next(axes), share, [("filled", "slots filled"), ("eta", "eta")], scale=100)
    plots.samples(next(axes), "Requests in the server", [("waiting", "waiting"), ("running", "running")])
    plots.samples(
        next(axes), "Preemptions since the start of the run", [("preemptions", "preemptions")], from_zero=True
    )
    for name, result in zip(names, results, strict=True):
        plots.outcomes(next(axes), name, result["series"])
    for unused in axes:
        unused.remove()
    figure.savefig(path)


class _Plots:
    """Draws the series of one or two results over the time of the run; the phases are shaded."""

    def __init__(self, names: Sequence[str], results: Sequence[dict[str, Any]]) -> None:
        self._runs = list(zip(names, ("C0", "C1"), results, strict=False))
        self._windows = results[0]["windows"]
        self._end = max(max(result["series"]["t"], default=1.0) for result in results)  # A and B share their axis

    def lines(self, axes: Any, title: str, pairs: Pairs, *, scale: float = 1.0, log: bool = False) -> None:
        """Draw fields of each result's series: the first in full colour, the second lighter."""
        for name, colour, result in self._runs:
            self._curves(axes, name, colour, result["series"], pairs, scale)
        if log:
            axes.set_yscale("log", nonpositive="mask")
        self._finish(axes, title, log=log)

    def samples(self, axes: Any, title: str, pairs: Pairs, *, scale: float = 1.0, from_zero: bool = False) -> None:
        """Draw fields that were sampled from the server's metrics.  `from_zero`: less its first value of the run."""
        for name, colour, result in self._runs:
            self._curves(axes, name, colour, result["series"]["samples"], pairs, scale, from_zero=from_zero)
        self._finish(axes, title)

    def outcomes(self, axes: Any, name: str, series: dict[str, Any]) -> None:
        """Draw stacked bars of requests by when they were due."""
        floor = [0.0] * len(series["t"])
        for field, label in OUTCOMES.items():
            heights = series[field]
            axes.bar(series["t"], heights, series["bucket_s"], floor, align="edge", color=COLOURS[field], label=label)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        self._finish(axes, f"Outcomes of requests{f' of {name}' if name else ''}, by when they were due")

    def _curves(
        self,
        axes: Any,
        name: str,
        colour: str,
        source: dict[str, Any],
        pairs: Pairs,
        scale: float,
        *,
        from_zero: bool = False,
    ) -> None:
        for (field, label), alpha in zip(pairs, (1.0, 0.5), strict=False):
            values = source.get(field) or [None] * len(source["t"])  # results of earlier versions lack some
            first = next((value for value in values if value is not None), 0) if from_zero else 0
            ys = [math.nan if value is None else (value - first) * scale for value in values]  # nan: a gap
            axes.plot(source["t"], ys, color=colour, alpha=alpha, label=f"{name} {label}".strip())

    def _finish(self, axes: Any, title: str, *, log: bool = False) -> None:
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("s")
        axes.set_xlim(0, max([self._end, *(stop for _, stop in self._windows.values())]))
        if not log:
            axes.set_ylim(bottom=0)
        for at, (begin, stop) in enumerate(self._windows.values()):
            if at % 2:
                axes.axvspan(begin, stop, color="0.93", zorder=0)
        axes.legend(fontsize=8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A.json", help="a result of replay")
    parser.add_argument("b", type=Path, metavar="B.json", nargs="?", help="a second result, compared with the first")
    parser.add_argument("--out", type=Path, default=Path("report.png"), help="png, svg or pdf; default report.png")
    parser.add_argument(
        "--tolerance", type=float, default=0.1, help="fraction of A by which B may be worse; default 0.1"
    )


def main(args: argparse.Namespace, command: str) -> int:
    try:
        results = [load(path) for path in (args.a, args.b) if path is not None]
        if len(results) == 2:
            same_work(*results)
    except (OSError, ResultError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = judge(results, args.tolerance)
    for row in rows:
        cells = "".join(f"{show(value, row.figure.unit):>18}" for value in row.values)
        tail = f"  {change(row):>14}{'  worse' if row.worse else ''}" if len(results) == 2 else ""
        print(f"{row.figure.name:36}{cells}{tail}")
    if len(results) == 2:
        print(verdict(rows, args.tolerance))
    try:
        draw(results, args.out)
    except ImportError:
        print("no plots: matplotlib is not installed; pip install 'quire[report]'", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"cannot draw {args.out}: {error}", file=sys.stderr)
        return 2
    print(f"written to {args.out}")
    return int(any(row.worse for row in rows))
