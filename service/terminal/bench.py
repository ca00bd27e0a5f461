"""`quire bench`: sends a small open-loop load to a running server, and prints a table of latencies at the end.

It uses modules of loadtest, whose own command, `python -m quire.loadtest replay`, also has workloads, bursts, tenants,
retries and reports.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.loadtest.clients import ClientProfile
from quire.loadtest.replay import Options, replay
from quire.loadtest.stats import Record, spread
from quire.loadtest.trace import Job
from quire.loadtest.workloads import Arrival, gaps
from quire.service.terminal import options, server
from quire.service.terminal.options import BenchConfig

PROG = "quire bench"
STOPPED = 130  # exit status after Ctrl-C
PHASE = "steady"
TOKEN_SERVERS = ("quire", "vllm", "sglang")  # `owned_by` of servers that accept token ids and ignore_eos
MAX_ERRORS = 5  # maximum distinct errors listed


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command.  Returns the exit status: 1 when a request was not answered completely."""
    config = settings.load(BenchConfig, words, options.environment(environ), prog=PROG, positional="url")
    try:
        return asyncio.run(_run(config))
    except OperatorError as error:
        settings.stop(PROG, str(error), error.exit_status)
    except KeyboardInterrupt:
        print(f"{PROG}: stopped before all requests were answered", file=sys.stderr)
        return STOPPED


def arrivals(config: BenchConfig) -> list[Arrival]:
    """Return the load: Poisson arrivals, with prompts and answers of one length.

    No two prompts share a prefix, so a prefix cache has no effect.  A refused request is not sent again."""
    rng = random.Random(config.seed if config.seed >= 0 else None)
    client = ClientProfile(retry="never")
    found: list[Arrival] = []
    at_s = 0.0
    for gap in gaps(config.rate, 1.0, rng):
        at_s += gap
        if len(found) == config.requests if config.requests else at_s >= config.seconds:
            return found
        job = Job(config.prompt_tokens, config.max_tokens, rng.getrandbits(62))
        found.append(Arrival(at_s, PHASE, job, client))
    raise AssertionError("arrivals never end")


async def _run(config: BenchConfig) -> int:
    base, console = server.base_url(config.url), Console(highlight=False)
    async with server.session(config.api_key) as client:
        card = server.choose_model(base, await server.model_cards(client, base), config.model)
    text = config.text or card.get("owned_by") not in TOKEN_SERVERS
    due = arrivals(config)
    if not due:
        raise server.AddressError(
            f"no request arrives in {config.seconds:g} s at {config.rate:g} a second; raise either"
        )
    chosen = Options(
        url=base,
        model=str(card["id"]),
        metrics_url="",  # the table shows no metrics
        text=text,
        ignore_eos=not text,
        api_key=config.api_key,
        timeout_s=config.timeout_s,
        seed=max(config.seed, 0),
    )
    kind, bound = ("words", "at most ") if text else ("token ids", "")
    about = (
        f"{len(due)} requests at {config.rate:g} a second to {chosen.model} at {base}: prompts of "
        f"{config.prompt_tokens} {kind}, answers of {bound}{config.max_tokens} tokens"
    )
    console.print(Text(server.printable(about)), soft_wrap=True)
    records = await _replay(due, chosen)
    console.print(table(records))
    for line in errors(records):
        console.print(Text(line, style="red"), soft_wrap=True)
    return 0 if all(record.outcome == "ok" for record in records) else 1


async def _replay(due: list[Arrival], chosen: Options) -> list[Record]:
    """Send all requests, and wait until they have ended.  On a terminal, shows a progress bar."""
    columns = (
        TextColumn("answered"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[open]}"),
    )
    console = Console(stderr=True)
    counts: Counter[str] = Counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(due), open="")

        def tick(event: str) -> None:
            counts[event] += 1
            shown = f"{counts['sent'] - counts['ended']} open, {counts['refused']} refused"
            bar.update(task, completed=counts["ended"], open=shown)

        records, _ = await replay(due, chosen, tick)
    return records


def table(records: Sequence[Record]) -> Table:
    """Return the table of a run: latencies in ms from when a request was due, and rates over the complete run."""
    done = [record for record in records if record.outcome == "ok"]
    span = max((record.end_s for record in records), default=0.0) or 1e-9
    found = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in ("", "p50", "p90", "p99", "mean", "max"):
        found.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, values in (
        ("TTFT, ms", [t for record in records if (t := record.ttft_s) is not None]),
        ("gap between tokens, ms", [gap for record in records for gap in record.gaps_s]),
        ("whole answer, ms", [record.end_s - record.due_s for record in done]),
    ):
        found.add_row(name, *_cells(values))
    tokens = sum(record.tokens for record in records)
    refused = [record for record in records if record.outcome == "refused"]
    failed = [record for record in records if record.outcome not in ("ok", "refused")]
    found.add_section()
    for name, value in (
        ("requests", f"{len(records)}"),
        ("complete", f"{len(done)}"),
        ("refused (429, 503)", f"{len(refused)}"),
        ("failed", f"{len(failed)}"),
        ("output tokens", f"{tokens:,}"),
        ("output tokens/s", f"{tokens / span:,.1f}"),
        ("requests/s", f"{len(done) / span:,.2f}"),
        ("seconds", f"{span:,.1f}"),
    ):
        found.add_row(name, value)
    return found


def errors(records: Sequence[Record]) -> list[str]:
    """Return the most frequent reasons of requests that were not answered, one line each."""
    found = Counter(
        record.error or f"status {record.attempts[-1].status}" for record in records if record.outcome != "ok"
    )
    return [f"{times} times: {server.printable(error)}" for error, times in found.most_common(MAX_ERRORS)]


def _cells(values: Iterable[float]) -> list[str]:
    figures = spread(values)
    if figures is None:
        return ["-"] * 5
    return [f"{figures[name] * 1000:,.1f}" for name in ("p50", "p90", "p99", "mean", "max")]
