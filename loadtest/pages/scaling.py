"""docs/scaling.md: maximum load of one Redis, and simulated fleets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.loadtest.pages import Results, facts, v
from quire.loadtest.pages.benchmarks import fleet

PAGE = "docs/scaling.md"
FACTS = facts("scaling")


def lines(results: Results) -> Iterator[str]:
    """Yield the page's texts that contain measured values."""
    plain = results["gateway_tools"]["figures"]["plain"]["tokens_per_s"]
    yield f"CPU of a gateway near one core: {v(round(plain, -3), ',')} tokens/s"
    yield from redis(results["redis_load"])
    yield from busy_redis(results["redis_full"]["figures"])
    yield from fleet(results)
    large = results["scale"]["runs"][1]
    small = results["scale"]["runs"][5]
    yield (
        f"hit rate {v(large['hit_rate'], '.2f')}, TTFT p50 {v(1000 * large['ttft'][0], '.0f')} ms, p90 "
        f"{v(1000 * large['ttft'][1], '.0f')} ms; with four {v(small['hit_rate'], '.2f')}, "
        f"{v(1000 * small['ttft'][0], '.0f')} and {v(1000 * small['ttft'][1], '.0f')} ms"
    )
    yield f"Redis needs {v(large['redis']['cores'], '.1f')} cores with 16 engines, {v(small['redis']['cores'], '.1f')} with four."
    often = results["scale"]["runs"][4]["redis"]
    yield f"With 2 ms a cell of eight makes {v(often['exchanges_per_request'], '.1f')} syncs per request"


def redis(result: dict[str, Any]) -> Iterator[str]:
    runs = result["figures"]["configurations"]
    yield f"load average {v(result['load_average'])}"
    queued = next(run["queued_bytes"] for run in runs if run["sequences"] == 256)
    yield f"A queued request takes {v(queued / 1000, '.1f')} KB of memory"
    yield from per_gateway(runs)
    for run in runs:
        if run["sequences"] == 64 and run["engines"] == 1 and run["tenants"] == 1:
            step = run["step"]
            kb = ", ".join(v(step[key] / 1000, ".1f") for key in ("in_bytes", "out_bytes"))
            each = (step["in_bytes"] + step["out_bytes"]) / 64
            yield (
                f"| {run['gateways']} | {v(step['cpu_us'], '.0f')} | {v(step['commands'], '.0f')} | {kb} | {v(each, '.0f')} |"
            )
    for run in runs:
        if run["gateways"] == 1 and (run["tenants"] > 1 or (run["sequences"] in (1, 16) and run["engines"] != 4)):
            busy, quiet = (v(run[part]["out_bytes"] / 1000, ".1f") for part in ("reading", "quiet"))
            yield (
                f"| {run['engines']:,} × {run['tenants']:,} | {v(run['submit']['cpu_us'], ',.0f')} | "
                f"{v(run['submit']['commands'], '.0f')} | {v(run['reading']['cpu_us'], ',.0f')} | {busy} | {quiet} |"
            )


def busy_redis(figures: dict[str, Any]) -> Iterator[str]:
    """Yield how many steps one Redis carries that never waits, with one thread and with I/O threads."""
    runs = {(run["io_threads"], run["gateways"]): run for run in figures["runs"]}
    threads = max(number for number, _ in runs)
    counts = sorted({gateways for _, gateways in runs})
    yield f"{figures['engines']} engines of {figures['sequences']} sequences"
    yield f"{v(figures['idle_cores'])} cores of the machine of `redis_full.json`"
    for gateways in counts:
        cells = (
            f"{v(run['steps_per_s'], ',')} | {v(run['thread_us'], '.0f')}"
            for run in (runs[1, gateways], runs[threads, gateways])
        )
        yield f"| {gateways} | {' | '.join(cells)} |"
    least, most = counts[0], counts[-1]
    yield f"A step at {most} gateways takes {v(runs[1, most]['thread_us'] / runs[1, least]['thread_us'], '.1f')} times the time"
    yield f"`io-threads {threads}` keeps {v(runs[threads, most]['cores'], '.0f')} cores busy"
    more = runs[threads, most]["steps_per_s"] / runs[1, most]["steps_per_s"] - 1
    yield f"at {most} gateways carries {v(100 * more, '.0f')} % more steps"


def per_gateway(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the cost of each further gateway in a step of 64 sequences."""
    steps = {run["gateways"]: run["step"] for run in runs if (run["engines"], run["sequences"]) == (1, 64)}
    added, inside = ((steps[64][key] - steps[1][key]) / 63 for key in ("cpu_us", "script_us"))
    yield f"{v(added, '.1f')} us per gateway and step, of which {v(inside, '.1f')} us are `PUBLISH`"
    yield f"take {v(steps[64]['cpu_us'] / steps[1]['cpu_us'], '.1f')} times the time of one"
