"""docs/locality.md: simulated fleets, and what a claim costs Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.loadtest.pages import Results, facts, v

PAGE = "docs/locality.md"
FACTS = facts("locality")
# row's start on the page -> index of the run
ROWS = {
    "| 600 prefixes of 1,000 tokens | order | 130 |": 13,
    "| | order | 150 |": 2,
    "| | **locality** | **400** |": 0,
    "| | one | 400 |": 1,
    "| chats of 6 turns | order | 50 chats |": 7,
    "| | **locality** | 50 chats |": 5,
    "| | one | 50 chats |": 6,
    "| unique prompts of 1,000 tokens | order | 140 |": 4,
    "| | **locality** | 140 |": 3,
    "| half prefixes, half unique | order | 180 |": 12,
    "| | **locality** | 180 |": 11,
    "| | one | 180 |": 14,
}
BOLD = {0, 5, 3, 11}  # runs of which the page shows some cells in bold


def lines(results: Results) -> Iterator[str]:
    """Yield the page's texts that contain measured values."""
    runs = results["locality"]["runs"]
    for start, index in ROWS.items():
        run = runs[index]
        hits = v(run["hit_rate"], ".2f") if run["hit_rate"] else v(0)
        times = ", ".join(v(1000 * s, ".0f") for s in run["ttft"][:2])
        hits = f"**{hits}**" if index in BOLD - {3} else hits
        yield f"{start} {hits} | {f'**{times}**' if index in BOLD else times} |"
    hit = runs[0]["hit_rate"] / runs[1]["hit_rate"]
    yield f"serves the prefix workload at {v(400 / 150, '.1f')} times the rate of *order*"
    yield f"and with {v(hit, '.2f')} of the hit rate of *one*"
    yield f"({v(runs[3]['served_per_s'], '.0f')} instead of {v(runs[4]['served_per_s'], '.0f')} served per second)"
    quiet = {index: v(1000 * runs[index]["ttft_by_tenant"]["quiet"][2], ".0f") for index in (8, 9, 10, 15, 16)}
    yield f"150 prefix requests per second: {quiet[8]} ms in order, {quiet[9]} ms with locality."
    yield f"too much for the engines: {quiet[10]} ms. Without the other tenant: {quiet[16]} ms in order and {quiet[15]} ms with locality."
    yield from claims(results["locality"]["exchange_script"]["runs"][2:])


def claims(runs: list[dict[str, Any]]) -> Iterator[str]:
    prefixes, unique = runs
    for name, key, form in (
        ("ends one and claims one, after a pause", "", ".0f"),
        ("minimum of 300", "least_", ".0f"),
        ("claims one, in bursts of 50", "busy_", ".0f"),
    ):
        yield f"| {name} | {v(prefixes[f'{key}order_us'], form)} | {v(prefixes[f'{key}locality_us'], form)} |"
    yield (
        f"| Redis commands of the first row | {v(prefixes['order_commands'], '.0f')} | "
        f"{v(prefixes['locality_commands'], '.0f')} |"
    )
    pause = (
        f"{v(unique['order_us'], '.0f')} us in order and {v(unique['locality_us'], '.0f')} us by prefix after a pause"
    )
    yield f"takes {pause}, {v(unique['busy_order_us'], '.0f')} and {v(unique['busy_locality_us'], '.0f')} us in bursts."
