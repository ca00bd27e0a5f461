"""`quire top`: engines, queue, latencies and tenants in a terminal, from the metrics of the gateways.

    GET URL/metrics each second --> readings.py --> tables --> the screen (rich), or plain text once

Keys: n, t, w, r, k and p choose the sort order, and reverse it if pressed again; q and Ctrl-C end the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.service.terminal import options, server
from quire.service.terminal.options import TopConfig
from quire.service.terminal.readings import (
    SORTS,
    Figures,
    Latency,
    NotQuire,
    Percentiles,
    Reading,
    figures,
    merge,
    read,
    sort_rows,
)

PROG = "quire top"
PAGE_S = 5.0  # timeout in seconds for reading a page of metrics
PLAIN_WIDTH = 120  # width in columns of output that is no terminal
NONE = "-"  # shown for an unknown value


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command.  Returns the exit status."""
    config = settings.load(TopConfig, words, options.environment(environ), prog=PROG, positional="urls")
    try:
        if config.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            return asyncio.run(_once(config))
        options.heed_interrupts()
        return asyncio.run(_watch(config))
    except OperatorError as error:
        settings.stop(PROG, str(error), error.exit_status)
    except KeyboardInterrupt:
        return 0


# ------------------------------------------------------------------------------------------------------------ reading


async def fetch(client: aiohttp.ClientSession, url: str) -> Reading:
    """Read one gateway's metrics.  Raises ServerError, whose message says what to change."""
    address = url if url.endswith("/metrics") else f"{url}/metrics"
    try:
        async with asyncio.timeout(PAGE_S), client.get(address) as response:
            status, body = response.status, await response.read()
    except server.FAILURES as error:
        raise server.unreachable(address, error) from None
    if status == 404:
        raise server.ServerError(
            f"{address} answered 404: {server.error_text(body)}. Start the gateway with --metrics-port PORT, and give "
            "top that port"
        )
    if status != 200:
        raise server.refused(address, status, body)
    try:
        return read(body.decode(errors="replace"), time.monotonic())
    except NotQuire as error:
        raise server.ServerError(f"{address}: {error}") from None


async def fetch_all(client: aiohttp.ClientSession, urls: Sequence[str]) -> Reading:
    """Read all gateways at the same time.  Raises ServerError if one cannot be read."""
    return merge(await asyncio.gather(*(fetch(client, url) for url in urls)))


def _client() -> aiohttp.ClientSession:
    """Return a session that keeps one connection to each address.

    Gateways that share a port take new connections in turn, but a connection stays with one gateway."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit_per_host=1, keepalive_timeout=600))


async def _once(config: TopConfig) -> int:
    urls = [server.base_url(url) for url in config.urls]
    async with _client() as client:
        before = await fetch_all(client, urls)
        await asyncio.sleep(config.interval_s)
        now = await fetch_all(client, urls)
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    Console(width=width, highlight=False).print(render(figures(now, before), urls))
    return 0


# ------------------------------------------------------------------------------------------------------------- screen


class Screen:
    """The state of the screen: the chosen sort order, and the last readings."""

    def __init__(self, window_s: float, urls: Sequence[str]) -> None:
        self.sort, self.reverse, self.leaving = "n", False, False
        self.trouble = ""  # why the last reading failed; "": it did not
        self._window_s, self._urls = window_s, urls
        self._readings: deque[Reading] = deque()

    def add(self, reading: Reading) -> None:
        """Add a reading, and drop those older than the window, except the newest of them."""
        self.trouble = ""
        self._readings.append(reading)
        while len(self._readings) > 2 and self._readings[1].at_s <= reading.at_s - self._window_s:
            self._readings.popleft()

    def press(self, key: str) -> None:
        """Handle one key; unknown keys have no effect."""
        if key in ("q", "Q", "\x03", "\x04"):
            self.leaving = True
        elif key in SORTS:
            self.reverse = key == self.sort and not self.reverse
            self.sort = key

    def render(self) -> RenderableType:
        """Return the complete screen."""
        before = self._readings[0] if len(self._readings) > 1 else None
        found = sort_rows(figures(self._readings[-1], before), self.sort, reverse=self.reverse)
        parts: list[RenderableType] = [render(found, self._urls)]
        if self.trouble:
            parts.append(Text(f"{self.trouble}; retrying", style="bold red"))
        keys = "  ".join(f"{key} {name}" for key, (name, _, _) in SORTS.items())
        chosen = SORTS[self.sort][0] + (", reversed" if self.reverse else "")
        parts.append(Text(f"sorted by {chosen}.  Keys: {keys}  q quit", style="dim"))
        return Group(*parts)


async def _watch(config: TopConfig) -> int:
    urls = [server.base_url(url) for url in config.urls]
    screen = Screen(config.window_s, urls)
    async with _client() as client:
        screen.add(await fetch_all(client, urls))  # not in the screen: an error stays visible
        pressed = asyncio.Event()
        with Live(screen.render(), screen=True, auto_refresh=False) as live, _keys(screen, pressed):
            due = time.monotonic() + config.interval_s
            while not screen.leaving:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pressed.wait(), max(0.0, due - time.monotonic()))
                pressed.clear()
                if time.monotonic() >= due:
                    try:
                        screen.add(await fetch_all(client, urls))
                    except server.ServerError as error:
                        screen.trouble = str(error)
                    due = max(due, time.monotonic() - config.interval_s) + config.interval_s
                live.update(screen.render(), refresh=True)
    return 0


@contextlib.contextmanager
def _keys(screen: Screen, pressed: asyncio.Event) -> Iterator[None]:
    """A context in which each key press is read at once and is not echoed."""
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)

    def ready() -> None:
        keys = os.read(number, 64).decode(errors="ignore")
        if not keys:  # the terminal is gone
            screen.leaving = True
        for key in keys:
            screen.press(key)
        pressed.set()

    tty.setcbreak(number)
    loop.add_reader(number, ready)
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)


# ------------------------------------------------------------------------------------------------------------- tables


def render(found: Figures, urls: Sequence[str]) -> RenderableType:
    """Return the summary, the table of engines, and the table of tenants if there are any."""
    parts: list[RenderableType] = [summary(found, urls), engine_table(found)]
    if found.tenants:
        parts.append(tenant_table(found))
    return Group(*parts)


def summary(found: Figures, urls: Sequence[str]) -> Table:
    """Return lines with values of all engines and gateways."""
    table = Table.grid(padding=(0, 2))

    def line(name: str, text: str, style: str = "") -> None:
        table.add_row(name, Text(text, style=style))

    window = "since the start" if found.seconds is None else f"last {found.seconds:.0f} s"
    names = server.printable(", ".join(urls))
    line(
        "quire", f"{names}  {plural(len(found.engines), 'engine')}, {plural(found.gateways, 'gateway')} read, {window}"
    )
    running, waiting = sum(row.running for row in found.engines), sum(row.waiting for row in found.engines)
    line("requests", f"{count(found.open_requests)} open at these gateways, {number(found.requests_per_s)} a second")
    line("sequences", f"{count(running)} running, {count(waiting)} waiting in engines")
    lanes = [
        f"{name.replace('_', '-')} {count(lane.requests)} ({count(lane.tokens)} tokens, oldest {lane.oldest_s:.1f} s)"
        for name, lane in found.lanes.items()
    ]
    line("queue", ", ".join(lanes))
    line("output", f"{number(found.tokens_per_s)} tokens/s, prefix hits {percent(found.hit_rate)}")
    line("drafts", drafts(found))
    line("TTFT", percentiles(found.first_token))
    line("ITL", percentiles(found.inter_token))
    preempted = NONE if found.preempted is None else count(found.preempted)
    line("preempted", f"{preempted}, {count(found.preemptions)} since the engines started")
    line("refusals", ", ".join(f"{name} {count(times)}" for name, times in found.refusals.items()) or "none")
    if found.quarantined:
        line("quarantine", f"{count(found.quarantined)} requests: see quire quarantine list", "bold red")
    if found.lost_tokens:
        line("lost", f"{count(found.lost_tokens)} tokens never arrived", "bold red")
    return table


def engine_table(found: Figures) -> Table:
    """Return a table with a row for each engine."""
    table = _table(
        "engine", "model", "running", "waiting", "KV", "cached", "blocks", "tokens/s", "/step", "hits", "pre", "seen"
    )
    for row in found.engines:
        table.add_row(
            Text(row.name),
            Text(row.model),
            count(row.running),
            count(row.waiting),
            percent(row.used),
            percent(row.cached),
            count(row.blocks),
            number(row.tokens_per_s),
            number(row.tokens_per_step),
            percent(row.hit_rate),
            count(row.preemptions),
            f"{row.silent_s:.1f} s",
        )
    if not found.engines:
        table.add_row(Text("no engine has a live lease", style="red"))
    return table


def tenant_table(found: Figures) -> Table:
    """Return a table with a row for each tenant."""
    table = _table("tenant", "queued tokens", "service", "requests/s", "tokens/s", "refused")
    for row in found.tenants:
        table.add_row(
            Text(row.name),
            count(row.queued_tokens),
            NONE if row.service is None else count(row.service),
            number(row.requests_per_s),
            number(row.tokens_per_s),
            count(row.refused),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for at, name in enumerate(names):
        text = name in ("engine", "tenant", "model")
        table.add_column(
            name,
            justify="left" if text else "right",
            no_wrap=True,
            overflow="ellipsis" if text else "crop",
            min_width=8 if text else len(name),
            ratio=1 if at == 0 else None,
        )
    return table


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def count(value: float) -> str:
    return f"{value:,.0f}"


def number(value: float | None) -> str:
    """Return a rate with at least three significant digits."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def duration(latency: Latency | None) -> str:
    """Return a latency as text: in milliseconds below a second, else in seconds."""
    if latency is None:
        return NONE
    seconds = latency.seconds
    shown = (
        f"{seconds * 1000:.1f} ms"
        if seconds < 0.1
        else f"{seconds * 1000:.0f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )
    return f"> {shown}" if latency.beyond else shown


def drafts(found: Figures) -> str:
    """Return a line about speculative decoding."""
    if found.drafts is None:
        return "off"
    shares = [
        f"{server.printable(source)} {percent(accepted / computed)} of {count(computed)}"
        for source, (computed, accepted) in found.drafts.sources.items()
        if computed
    ]
    return (
        f"{number(found.tokens_per_step)} tokens per step, accepted: {', '.join(shares) or 'none computed'}, "
        f"{count(found.drafts.refused)} would not have paid"
    )


def percentiles(found: Percentiles) -> str:
    if found.p50 is None:
        return "no request was answered yet"
    shown = "   ".join(f"{name} {duration(getattr(found, name))}" for name in ("p50", "p90", "p99"))
    return shown if found.recent else f"{shown}   (since the start)"
