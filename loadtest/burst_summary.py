"""The table of `python -m quire.loadtest burst`: medians over seeds, one block per load, and the targets.

Pure: results in, measurements and text out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.loadtest.report import look_up, show

GAP_S = 0.1  # target: maximum gap of a stream, seconds
ORACLE = ("simulated", "bound", "without_lengths")  # shares of `loadtest.studies oracle`


@dataclass(frozen=True)
class Column:
    """A measurement in the summary, in a unit of report.show().  `limits`: load -> (minimum, maximum) of the target."""

    name: str
    path: str
    unit: str
    limits: tuple[tuple[str, float, float], ...] = ()


def _every_load(low: float, high: float) -> tuple[tuple[str, float, float], ...]:
    return tuple((load, low, high) for load in ("known", "cold", "warm"))


ANY = math.inf
COLUMNS = (
    Column("requests", "requests", ""),
    Column("on time, due in the burst", "overload.on_time.burst", "%"),
    Column("on time, of all", "overload.on_time.all", "%"),
    Column("on time, due before the burst", "overload.on_time.base", "%"),
    Column("on time, due after the burst", "overload.on_time.after", "%"),
    Column("burst, of the oracle's", "compared.burst_of_oracle", "%", _every_load(0.9, ANY)),
    Column("burst, of the upper bound", "compared.burst_of_bound", "%"),
    Column("burst, of the best without lengths", "compared.burst_of_without_lengths", "%"),
    Column("all, of the oracle's", "compared.all_of_oracle", "%"),
    Column("all, of the upper bound", "compared.all_of_bound", "%"),
    Column("answered", "overload.answered", ""),
    Column("unanswered", "overload.unanswered", "", _every_load(0, 0)),
    Column("answers 429", "overload.refusals_429", "", _every_load(0, 0)),
    Column("last first token at", "overload.last_first_token_s", "s"),
    Column("the same over fifo's", "compared.last_first_token_of_fifo", "", _every_load(0, 1.05)),
    Column("last answer ended at", "overload.last_end_s", "s"),
    Column("pool in use before the burst", "overload.kv_before_burst", "%"),
    Column("pool in use while any wait", "overload.kv_while_waiting", "%", _every_load(0.93, ANY)),
    Column("seconds in which any wait", "overload.waiting_s", "s"),
    Column("idle pool x seconds", "overload.idle_pool_s", "s"),
    Column("preemptions", "overload.preemptions", "", (("known", 0, 0),)),
    Column("preemptions per 1,000", "overload.preemptions_per_1000", "", (("cold", 0, 1), ("warm", 0, 1))),
    Column("recomputed tokens", "server.recomputed_tokens", ""),
    Column("longest gap", "overload.longest_gap_s", "ms", _every_load(0, GAP_S)),
    Column("ITL p99", "itl_s.p99", "ms"),
    *(
        Column(f"TTFT {p}, {phase}", f"phases.{phase}.ttft_s.{p}", "ms")
        for phase in ("base", "burst", "after")
        for p in ("p50", "p90", "p99")
    ),
    *(
        Column(f"{lane}, burst: {name}", f"overload.lanes.burst.{lane}.{path}", unit)
        for lane in ("on_time", "late", "none")
        for name, path, unit in (
            ("requests", "requests", ""),
            ("TTFT p50", "ttft_s.p50", "ms"),
            ("TTFT p90", "ttft_s.p90", "ms"),
            ("TTFT p99", "ttft_s.p99", "ms"),
        )
    ),
    Column("TTFT back at base after", "recovery_s", "s"),
)


def median(values: Sequence[float | None]) -> float | None:
    """Return the upper median, with None larger than every number; None if None is the median."""
    middle = statistics.median_high(math.inf if value is None else value for value in values)
    return None if math.isinf(middle) else middle


def compared(result: dict[str, Any], fifo: dict[str, Any] | None, oracle: dict[str, Any] | None) -> dict[str, Any]:
    """Return a run's measurements divided by those of `fifo` with the same load and seed, and by the oracle's.

    oracle: {"burst": {"simulated": share, "bound": share, "without_lengths": share}, "all": {...}}, the output of
    `loadtest.studies oracle --json`."""
    own = result["figures"]["overload"]

    def ratio(a: float | None, b: float | None) -> float | None:
        return None if a is None or not b else round(a / b, 4)

    last = None if fifo is None else fifo["figures"]["overload"]["last_first_token_s"]
    found = {"last_first_token_of_fifo": ratio(own["last_first_token_s"], last)}
    for which in ("burst", "all"):
        share, best = own["on_time"].get(which), (oracle or {}).get(which, {})
        found[f"{which}_of_oracle"] = ratio(share, best.get("simulated"))
        found[f"{which}_of_bound"] = ratio(share, best.get("bound"))
        found[f"{which}_of_without_lengths"] = ratio(share, best.get("without_lengths"))
    return found


def page(results: Sequence[dict[str, Any]], oracles: dict[int, dict[str, Any] | None]) -> dict[str, Any]:
    """Return the summary: runs, oracles, and load -> system -> measurement -> median over seeds."""
    by_key = {(result["load"], result["system"], result["seed"]): result for result in results}
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for (load, system, seed), result in by_key.items():
        fifo = by_key.get((load, "fifo", seed))
        figures = result["figures"] | {"compared": compared(result, fifo, oracles.get(seed))}
        runs.setdefault(load, {}).setdefault(system, []).append(figures)
    return {
        "seeds": {load: {system: len(each) for system, each in systems.items()} for load, systems in runs.items()},
        "oracle": {str(seed): oracle for seed, oracle in oracles.items()},
        "figures": {
            load: {
                system: {column.name: median([look_up(figures, column.path) for figures in each]) for column in COLUMNS}
                for system, each in systems.items()
            }
            for load, systems in runs.items()
        },
    }


def goals(found: dict[str, Any]) -> list[str]:
    """Return a line for each target of system `lanes`: its name, the measured value, the limit, and the verdict."""
    lines = []
    for load, systems in found["figures"].items():
        if "lanes" not in systems:
            continue
        for column in COLUMNS:
            value = systems["lanes"][column.name]
            for _, low, high in (limit for limit in column.limits if limit[0] == load):
                bounds = [f">= {show(low, column.unit)}"] if high == ANY else [f"<= {show(high, column.unit)}"]
                state = "no figure" if value is None else "reached" if low <= value <= high else "MISSED"
                lines.append(f"{load:6} {column.name:34} {show(value, column.unit):>10}  {bounds[0]:>12}  {state}")
    return lines


def table(found: dict[str, Any]) -> str:
    """Return a table for each load with a line per measurement and a column per system, then the targets."""
    lines = []
    for load, systems in found["figures"].items():
        counts = found["seeds"][load]
        head = "".join(f"{f'{system} ({counts[system]})':>15}" for system in systems)
        lines.append(f"{f'{load}: medians over seeds':36}{head}")
        for column in COLUMNS:
            values = [figures[column.name] for figures in systems.values()]
            if any(value is not None for value in values):
                lines.append(f"{column.name:36}" + "".join(f"{show(value, column.unit):>15}" for value in values))
        lines.append("")
    for seed, oracle in found["oracle"].items():
        if oracle:
            cells = (
                f"{which}: " + ", ".join(f"{name} {show(oracle[which].get(name), '%')}" for name in ORACLE)
                for which in ("burst", "all")
            )
            lines.append(f"perfect knowledge, seed {seed}: {'; '.join(cells)}")
    return "\n".join([*lines, "", *goals(found)])
