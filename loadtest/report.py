"""An HTML page of one replay result, or of two: plots, numbers, and whether the second is worse than the first.

    python -m quire.loadtest report A.json [B.json] [--out report.html] [--tolerance 0.1]

Exit status: 0; 1 if B is worse than A; 2 if they cannot be compared.  The page is one file without scripts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from quire.loadtest.svg import Bars, Line, chart


class ResultError(ValueError):
    """A file is not a result, or two results cannot be compared.  Names the file and the field."""


@dataclass(frozen=True)
class Judged:
    """A figure of the page, and how it is judged."""

    name: str
    path: str  # dotted path into the results
    unit: str  # ms (stored in seconds), %, or text printed after the number
    better: int  # 1: more is better, -1: less is better, 0: not judged
    noise: float  # a difference that never counts, in the stored unit


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
            raise ResultError(f"not the same goal: {field} is {limit} in A, {given} in B")


def judge(results: Sequence[dict[str, Any]], tolerance: float) -> list[Row]:
    """Return a row for each figure that any result has.

    B is worse where it is off by more than `tolerance` (a fraction of A) and by more than noise.  A figure that one of
    two results lacks is not judged."""
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


# ---------------------------------------------------------------------------------------------------------------- page

STYLE = """
:root{color-scheme:light dark;--fg:#1c2230;--dim:#667085;--bg:#fff;--card:#f6f7f9;--rule:#dfe3e8;--a:#1f6fd6;
--a2:#8ab6f0;--b:#c8580a;--b2:#f0b27a;--good:#2e9e6b;--late:#e0a526;--refused:#8a94a6;--failed:#d03b3b;--shade:#eef1f5}
@media(prefers-color-scheme:dark){:root{--fg:#e6e9ef;--dim:#98a2b3;--bg:#14171d;--card:#1c2129;--rule:#333a46;
--a:#5fa3f5;--a2:#3868a6;--b:#f08a3c;--b2:#9c5b26;--failed:#f27474;--shade:#29313e}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);margin:0 auto;max-width:1180px;
padding:24px}
h1{font-size:24px;margin:0}h2{font-size:16px;margin:0 0 4px}p,dl{margin:4px 0}.dim,.none{color:var(--dim)}
code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}.runs,.plots{display:grid;gap:16px;margin:16px 0;
grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr))}
section{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 16px}
.tiles{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));margin:16px 0}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:8px 14px}
.tiles b{display:block;font-size:22px;font-weight:600;white-space:nowrap}table{border-collapse:collapse;width:100%}
td,th{padding:4px 10px;border-bottom:1px solid var(--rule);text-align:right;font-variant-numeric:tabular-nums}
td:first-child,th:first-child{text-align:left}.worse td{color:var(--failed);font-weight:600}
.verdict{font-weight:600}.verdict.bad{color:var(--failed)}.verdict.fine{color:var(--good)}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--dim)}text.y{text-anchor:end}
text.x{text-anchor:middle}.grid{stroke:var(--rule)}.phase0{fill:none}.phase1{fill:var(--shade)}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.a{stroke:var(--a)}.a2{stroke:var(--a2)}.b{stroke:var(--b)}.b2{stroke:var(--b2)}
.good{fill:var(--good)}.late{fill:var(--late)}.refused{fill:var(--refused)}.failed{fill:var(--failed)}
.key{display:flex;flex-wrap:wrap;gap:2px 14px;color:var(--dim);font-size:13px}.key i{display:inline-block;width:14px;
height:4px;border-radius:2px;margin-right:5px;vertical-align:middle}
"""
OUTCOMES = {
    "good": "within the goal",
    "late": "late",
    "refused": "refused for good",
    "failed": "failed",
}


def page(results: Sequence[dict[str, Any]], tolerance: float) -> str:
    """The whole HTML document of one or two results."""
    rows = judge(results, tolerance)
    names = ["A", "B"] if len(results) == 2 else [""]
    config = results[0]["config"]["work"]
    head = f"{config['workload']}, {', '.join(f'{n} {r:g}/s for {s:g} s' for n, r, s in config['phases'])}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>Load test: {escape(head)}</title><style>{STYLE}</style></head><body>",
        f'<h1>Load test</h1><p class="dim">{escape(head)}</p>',
        verdict(rows, tolerance) if len(results) == 2 else "",
        '<div class="runs">',
        *(_run(name, result) for name, result in zip(names, results, strict=True)),
        "</div>",
    ]
    if len(results) == 1:
        parts += [_tiles(rows)]
    parts += ['<div class="plots">', *_plots(names, results), "</div>", _table(names, rows), *_phases(names, results)]
    return "".join([*parts, "</body></html>\n"])


def verdict(rows: Sequence[Row], tolerance: float) -> str:
    worse = [row.figure.name for row in rows if row.worse]
    if worse:
        return f'<p class="verdict bad">B is worse than A by more than {tolerance:.0%}: {escape(", ".join(worse))}.</p>'
    return f'<p class="verdict fine">B is nowhere worse than A by more than {tolerance:.0%}.</p>'


def _run(name: str, result: dict[str, Any]) -> str:
    config = result["config"]
    where = (
        ", ".join(str(result[key]) for key in ("gpu", "cpu") if result.get(key))
        + f", {result.get('cores')} cores, Python {result.get('python')}"
    )
    title = f"{name}: {config['model']}" if name else str(config["model"])
    seed = config["work"]["seed"]
    return (
        f"<section><h2>{escape(title)}</h2><p>{escape(str(result.get('note') or ''))}</p>"
        f"<p>{escape(str(result.get('time')))}, commit {escape(str(result.get('commit')))}, seed {seed}, "
        f"refused clients {escape(config['retry'])}</p>"
        f'<p class="dim">{escape(where)}</p><code>{escape(str(result.get("command")))}</code></section>'
    )


def _tiles(rows: Sequence[Row]) -> str:
    chosen = ("goodput", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "preemptions", "failed")
    tiles = [
        f"<div>{escape(row.figure.name)}<b>{show(row.values[0], row.figure.unit)}</b></div>"
        for row in rows
        if row.figure.name in chosen
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _plots(names: Sequence[str], results: Sequence[dict[str, Any]]) -> list[str]:
    windows = results[0]["windows"]
    end = max(max(result["series"]["t"], default=1.0) for result in results)  # plots of A and B share their axis

    def lines(pairs: Sequence[tuple[str, str]], *, sampled: bool = False, scale: float = 1.0) -> list[Line]:
        """Return a line for each result and (field, label): the first pair in full colour, the second lighter."""
        found = []
        for name, colour, result in zip(names, "ab", results, strict=False):
            source = result["series"]["samples"] if sampled else result["series"]
            for (field, label), shade in reversed(list(zip(pairs, ("", "2"), strict=False))):
                values = source.get(field) or [None] * len(source["t"])  # results of earlier versions lack some
                ys = [None if value is None else value * scale for value in values]
                found.append(Line(f"{name} {label}".strip(), colour + shade, source["t"], ys))
        return found

    def plot(title: str, parts: Sequence[Line | Bars], **options: Any) -> str:
        keys = []
        for part in parts:
            for label, style in (
                [(part.name, part.style)] if isinstance(part, Line) else [(n, s) for n, s, _ in part.layers]
            ):
                keys.append(f'<span><i style="background:var(--{style})"></i>{escape(label)}</span>')
        key = f'<div class="key">{"".join(keys)}</div>'
        return f"<section><h2>{escape(title)}</h2>{key}{chart(title, parts, windows, end=end, **options)}</section>"

    plots = [
        plot("Time to first token, ms", lines([("ttft_p99", "p99"), ("ttft_p50", "p50")], scale=1000), log=True),
        plot("Time between tokens, ms", lines([("itl_p99", "p99"), ("itl_p50", "p50")], scale=1000), log=True),
        plot("KV cache in use, %", lines([("kv", "in use")], sampled=True, scale=100), top=100),
        plot(
            "Slots that hold a token, and eta: blocks held of those that static allocation would hold, %",
            lines([("filled", "slots filled"), ("eta", "eta")], sampled=True, scale=100),
            top=100,
        ),
        plot("Requests in the server", lines([("waiting", "waiting"), ("running", "running")], sampled=True)),
        plot(
            "Preemptions since the start of the run", _from_zero(lines([("preemptions", "preemptions")], sampled=True))
        ),
    ]
    for name, result in zip(names, results, strict=True):
        source = result["series"]
        layers = [(label, field, source[field]) for field, label in OUTCOMES.items()]
        title = f"Outcomes of requests{f' of {name}' if name else ''}, by when they were due"
        plots.append(plot(title, [Bars(source["bucket_s"], source["t"], layers)]))
    return plots


def _from_zero(lines: Sequence[Line]) -> list[Line]:
    """Subtract each line's first value: counters start with the server, the plot with the run."""
    moved = []
    for line in lines:
        first = next((y for y in line.ys if y is not None), 0)
        moved.append(Line(line.name, line.style, line.xs, [None if y is None else y - first for y in line.ys]))
    return moved


def _table(names: Sequence[str], rows: Sequence[Row]) -> str:
    two = len(names) == 2
    heads = ["", *(names if two else ["value"]), *(["change"] if two else [])]
    lines = [f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"]
    for row in rows:
        cells = [escape(row.figure.name), *(show(value, row.figure.unit) for value in row.values)]
        cells += [change(row) + (" ▲ worse" if row.worse else "")] if two else []
        style = ' class="worse"' if row.worse else ""
        lines.append(f"<tr{style}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<section><h2>Figures</h2><table>{''.join(lines)}</table></section>"


def _phases(names: Sequence[str], results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of phases for each result with more than one phase."""
    columns = (
        ("requests", "requests", ""),
        ("TTFT p50", "ttft_s.p50", "ms"),
        ("TTFT p99", "ttft_s.p99", "ms"),
        ("ITL p50", "itl_s.p50", "ms"),
        ("ITL p99", "itl_s.p99", "ms"),
        ("goodput", "goodput_fraction", "%"),
        ("KV while waiting", "server.kv_mean_while_queueing", "%"),
        ("preemptions", "server.preemptions", ""),
    )
    tables = []
    for name, result in zip(names, results, strict=True):
        phases = result["figures"].get("phases", {})
        if len(phases) < 2:
            continue
        head = "".join(f"<th>{escape(title)}</th>" for title, _, _ in columns)
        lines = [f"<tr><th></th>{head}</tr>"]
        for phase, figures in phases.items():
            cells = "".join(f"<td>{show(look_up(figures, path), unit)}</td>" for _, path, unit in columns)
            lines.append(f"<tr><td>{escape(phase)}</td>{cells}</tr>")
        title = f"{name}: phases" if name else "Phases"
        tables.append(f'<section style="margin-top:16px"><h2>{title}</h2><table>{"".join(lines)}</table></section>')
    return tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A.json", help="a result of replay")
    parser.add_argument("b", type=Path, metavar="B.json", nargs="?", help="a second result, compared with the first")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="file of the page; default report.html")
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
    args.out.write_text(page(results, args.tolerance), encoding="utf-8")
    rows = judge(results, args.tolerance)
    for row in rows:
        cells = "".join(f"{show(value, row.figure.unit):>18}" for value in row.values)
        tail = f"  {change(row):>14}{'  worse' if row.worse else ''}" if len(results) == 2 else ""
        print(f"{row.figure.name:36}{cells}{tail}")
    print(f"written to {args.out}")
    return int(any(row.worse for row in rows))
