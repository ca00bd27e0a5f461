"""The harness against a real gateway, Redis and engine loop; only the tokens are made up."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.loadtest.clients import ClientProfile
from quire.loadtest.replay import Options, replay
from quire.loadtest.stats import Slo, summarise
from quire.loadtest.trace import Job
from quire.loadtest.workloads import Arrival, Phase, synthetic
from tests.pace import paced, patience
from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stack(redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]) -> Iterator[Stack]:
    with Stack(
        redis_server.url,
        namespace,
        checkpoint("llama"),
        executor="scripted",
        scripted_step_ms=2.0,
        max_model_len=1000,
        kv_blocks=400,
        check_accounting=False,
    ) as made:
        yield made


def options(url: str, **more: Any) -> Options:
    return Options(url=url, model="tiny", metrics_url=f"{url}/metrics", **more)


async def test_every_request_is_answered_with_every_token(stack: Stack) -> None:
    """Their number, their times, and what the server reported meanwhile."""
    arrivals = synthetic("sharegpt", [Phase("steady", 20.0, 2.0)], 1.0, seed=2, scale=0.2)
    events: list[str] = []
    records, samples = await replay(arrivals, options(stack.url), events.append)
    assert len(records) == len(arrivals) == events.count("sent") == events.count("ended")
    for arrival, record in zip(arrivals, records, strict=True):
        assert (record.outcome, record.error) == ("ok", "")
        assert record.tokens == arrival.job.output_len
        assert [attempt.status for attempt in record.attempts] == [200]
        assert record.times == sorted(record.times)
        assert record.due_s == arrival.at_s <= record.times[0] <= record.times[-1] <= record.end_s
    patient = Slo(ttft_s=60.0, itl_s=10.0)
    figures = summarise(records, samples, patient, {"steady": (0.0, 2.0)})
    assert figures["goodput"]["fraction"] == 1.0
    assert 0.002 < figures["itl_s"]["p50"] < figures["seconds"]
    assert figures["server"]["preemptions"] == 0
    assert 0 < figures["server"]["kv_max"] < 1
    assert figures["server"]["running_max"] >= 1
    assert abs(samples[0].at_s) <= samples[-1].at_s <= figures["seconds"] + 60


async def test_what_the_server_refuses_outright_is_an_error_and_not_retried(stack: Stack) -> None:
    records, _ = await replay([Arrival(0.0, "x", Job(5000, 5, 1))], options(stack.url))
    assert records[0].outcome == "error"
    assert records[0].error.startswith("400 context_length_exceeded: ")
    assert len(records[0].attempts) == 1


async def test_nobody_there_is_an_error_of_each_request() -> None:
    records, samples = await replay([Arrival(0.0, "x", Job(5, 5, 1))] * 2, options("http://127.0.0.1:9"))
    assert [(record.outcome, record.attempts[0].status) for record in records] == [("error", 0)] * 2
    assert samples == []


@pytest.mark.parametrize(("retry", "attempts"), [("obey", 2), ("ignore", 3), ("never", 1)])
async def test_refused_clients_obey_or_don_t(aiohttp_server: Any, retry: Any, attempts: int) -> None:
    """A server that is full for 0.9 s and refuses requests."""
    opened: list[float] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        opened.append(time.monotonic())
        left = 0.9 - (opened[-1] - opened[0])
        if left > 0:
            return web.Response(status=429, headers={"retry-after-ms": f"{left * 1000 + 50:.0f}"})
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n')
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    server = await aiohttp_server(app)
    url = str(server.make_url("")).rstrip("/")
    [record], samples = await replay([Arrival(0.0, "x", Job(5, 1, 1), ClientProfile(retry=retry))], options(url))
    assert samples == []  # it has no metrics
    assert len(record.attempts) == attempts
    assert record.outcome == ("refused" if retry == "never" else "ok")
    if retry == "obey":
        assert record.attempts[0].announced_s == pytest.approx(0.95)
        assert record.ttft_s is not None
        assert record.ttft_s >= 0.95


async def test_a_stream_that_is_cut_is_an_error(aiohttp_server: Any) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    url = str((await aiohttp_server(app)).make_url("")).rstrip("/")
    [record], _ = await replay([Arrival(0.0, "x", Job(5, 1, 1))], options(url))
    assert (record.outcome, record.error) == ("error", "the stream ended without [DONE]")
    assert record.tokens == 1


async def test_who_is_asking_reaches_the_server(aiohttp_server: Any) -> None:
    """Key, priority, what is left of the deadline, and a length that the server does not get."""
    seen: list[tuple[dict[str, str], Any]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        seen.append((dict(request.headers), await request.json()))
        if len(seen) == 1:
            return web.Response(status=429, headers={"retry-after-ms": "300"})
        response = web.StreamResponse()
        await response.prepare(request)
        usage = b'{"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}'
        await response.write(b'data: {"choices": [{"text": "x"}]}\n\ndata: ' + usage + b"\n\ndata: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    url = str((await aiohttp_server(app)).make_url("")).rstrip("/")
    client = ClientProfile("acme", -7, 20.0)
    [record], _ = await replay(
        [Arrival(0.0, "x", Job(5, 3, 1), client)], options(url, keys={"acme": "secret"}, ask_tokens=50, eos_id=9)
    )
    assert (record.outcome, record.tokens, record.cached) == ("ok", 3, 4)
    (first, _), (second, body) = seen
    assert second["Authorization"] == "Bearer secret"
    assert float(second["X-Request-Timeout"]) <= float(first["X-Request-Timeout"]) - 0.3 <= 19.7
    assert (body["priority"], body["max_tokens"], body["min_tokens"]) == (-7, 50, 2)
    assert body["logit_bias"] == {"9": 100.0}
    assert "ignore_eos" not in body


async def test_nobody_comes_back_for_an_answer_that_is_too_late(aiohttp_server: Any) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"retry-after-ms": "5000"})

    app = web.Application()
    app.router.add_post("/v1/completions", refuse)
    url = str((await aiohttp_server(app)).make_url("")).rstrip("/")
    [record], _ = await replay([Arrival(0.0, "x", Job(5, 3, 1), ClientProfile(timeout_s=4.0))], options(url))
    assert (record.outcome, len(record.attempts)) == ("refused", 1)


async def test_a_server_that_never_ends_does_not_hold_the_run_up(aiohttp_server: Any) -> None:
    hang = asyncio.Event()

    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        await hang.wait()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    url = str((await aiohttp_server(app)).make_url("")).rstrip("/")
    drain_s = paced(1.0)
    [record], _ = await replay([Arrival(0.0, "x", Job(5, 3, 1))], options(url, drain_s=drain_s))
    hang.set()
    assert (record.outcome, record.tokens) == ("error", 1)
    assert record.error == f"unfinished {drain_s:g} s after the last was due"


async def test_deadlines_that_pass_and_prompts_that_are_known(stack: Stack) -> None:
    """Of the real server: 504 or an error in the stream is the deadline's doing; the second prompt is cached."""
    same = Job(64, 5, 1)
    arrivals = [
        Arrival(0.0, "x", Job(5, 900, 2), ClientProfile(timeout_s=0.5)),
        Arrival(0.0, "x", same, ClientProfile(priority="high")),
        Arrival(1.0, "x", same, ClientProfile(priority=5)),
    ]
    records, samples = await replay(arrivals, options(stack.url))
    assert [record.outcome for record in records] == ["expired", "ok", "ok"]
    assert records[2].cached == 48  # complete blocks before the last token
    figures = summarise(records, samples, Slo(), {"x": (0.0, 2.0)})
    assert (figures["expired"], figures["failed"]) == (1, 0)
    assert figures["prefix_hits"]["rate"] == pytest.approx(48 / 128, abs=1e-3)


def test_two_tenants_at_ten_to_one(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("loud", "quiet")}
    tenants, keys, out = tmp_path / "tenants.toml", tmp_path / "keys.toml", tmp_path / "r.json"
    tenants.write_text("".join(f'[{name}]\nweight = 1\nkey_sha256 = ["{d}"]\n' for name, d in digests.items()))
    keys.write_text("".join(f'{name} = "{name}"\n' for name in digests))
    model = checkpoint("llama")
    with Stack(
        redis_server.url,
        namespace,
        model,
        executor="scripted",
        scripted_step_ms=1.0,
        max_model_len=1000,
        check_accounting=False,
        gateway_options={"tenants": str(tenants)},
    ) as stack:
        words = ["--workload", "alpaca", "--rate", "50", "--seconds", "2", "--keys", str(keys), "--out", str(out)]
        mix = ["--tenants", "loud=10,quiet=1", "--priorities", "high=1,low=1", "--retry", "obey=1,never=1"]
        done = run("quire.loadtest", "replay", stack.url, *words, *mix)
        assert done.returncode == 0, done.stderr
        both = json.loads(out.read_text())
        groups = both["figures"]["groups"]
        assert set(groups) == {"tenant", "priority", "retry"}
        assert groups["tenant"]["loud"]["requests"] > 4 * groups["tenant"]["quiet"]["requests"] > 0
        assert sum(group["completed"] for group in groups["tenant"].values()) == both["figures"]["completed"]
        assert both["figures"]["completed"] == both["figures"]["requests"]
        assert "tenant quiet: " in done.stdout
        done = run("quire.loadtest", "replay", stack.url, *words, *mix, "--only", "quiet")
        assert done.returncode == 0, done.stderr
        alone = json.loads(out.read_text())["figures"]
        assert alone["requests"] == alone["completed"] == groups["tenant"]["quiet"]["requests"]


def run(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
        **more,
    )


def test_the_command_writes_a_result_and_the_report_takes_it(stack: Stack, tmp_path: Path) -> None:
    out, lines = tmp_path / "r.json", tmp_path / "raw.jsonl"
    words = ["--workload", "alpaca", "--rate", "5", "--seconds", "1", "--peak", "20", "--peak-seconds", "1", "--seed=3"]
    done = run("quire.loadtest", "replay", stack.url, *words, "--out", str(out), "--raw", str(lines))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["config"]["model"] == "tiny"
    assert result["config"]["work"]["phases"] == [["base", 5.0, 1.0], ["burst", 20.0, 1.0], ["after", 5.0, 1.0]]
    assert result["commit"]
    assert result["figures"]["completed"] == result["figures"]["requests"] == result["config"]["work"]["requests"]
    raw = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(raw) == result["figures"]["requests"]
    assert sum(line["tokens"] for line in raw) == result["config"]["work"]["output_tokens"]
    report = run("quire.loadtest", "report", str(out), "--out", str(tmp_path / "r.svg"))
    assert report.returncode == 0, report.stderr
    assert "<svg" in (tmp_path / "r.svg").read_text()


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"prompt_len": 1, "output_len": 0}\n')
    done = run("quire.loadtest", "replay", "http://127.0.0.1:9", "--trace", str(trace))
    assert (done.returncode, done.stderr) == (
        1,
        "t.jsonl, line 1: output_len is 0; must be a whole number, >= 1, <= 10000000\n",
    )
    done = run("quire.loadtest", "replay", "http://127.0.0.1:9", "--rate", "0")
    assert done.returncode == 2
    assert "argument --rate: 0 is not a number > 0" in done.stderr
    done = run("quire.loadtest", "replay", "http://127.0.0.1:9")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "http://127.0.0.1:9/v1/models: " in done.stderr


def test_locust(stack: Stack, tmp_path: Path) -> None:
    """Every kind of user for three seconds: entries of their own, and no failure."""
    words = ["-f", "loadtest/locustfile.py", "--headless", "--host", stack.url, "--run-time", "3"]
    small = ["--users", "10", "--spawn-rate", "10", "--scale", "0.05", "--csv", str(tmp_path / "l"), "--only-summary"]
    done = run("locust", *words, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(",") for line in (tmp_path / "l_stats.csv").read_text().splitlines()[1:]]
    seen = {(row[0], row[1]): (int(row[2]), int(row[3])) for row in rows}
    for kind in ("Completion", "Chat", "Rag", "Agent", "Samples"):
        assert seen[kind, "ttft"][0] >= 1
        assert seen[kind, "itl"][0] >= 1
        assert seen[kind, "e2e"][0] == seen[kind, "ttft"][0]
    assert all(failed == 0 for _, failed in seen.values())


@pytest.mark.parametrize(
    ("shape", "words", "users"),
    [
        pytest.param("ramp", ["--users", "4", "--base-seconds", "2", "--run-time", "6"], 4, marks=pytest.mark.nightly),
        ("burst", ["--users", "2", "--base-seconds", "1", "--run-time", "5"], 6),
        pytest.param("soak", ["--users", "3", "--spawn-rate", "3", "--run-time", "3"], 3, marks=pytest.mark.nightly),
    ],
)
def test_locust_shapes(stack: Stack, tmp_path: Path, shape: str, words: list[str], users: int) -> None:
    """Short: as many clients arrive as the shape says, and none fails."""
    fixed = ["-f", "loadtest/locustfile.py", "Completion", "--headless", "--host", stack.url, "--scale", "0.05"]
    done = run("locust", *fixed, "--load-shape", shape, *words, "--csv", str(tmp_path / "l"), "--csv-full-history")
    assert done.returncode == 0, done.stdout + done.stderr
    history = [line.split(",") for line in (tmp_path / "l_stats_history.csv").read_text().splitlines()]
    count = history[0].index("User Count")
    assert max(int(row[count]) for row in history[1:]) == users
    stats = [line.split(",") for line in (tmp_path / "l_stats.csv").read_text().splitlines()[1:]]
    assert all(int(row[3]) == 0 for row in stats)
    assert any(row[1] == "e2e" and int(row[2]) >= users for row in stats)


def test_locust_counts_refusals(aiohttp_full: str, tmp_path: Path) -> None:
    words = ["-f", "loadtest/locustfile.py", "Completion", "--headless", "--host", aiohttp_full, "--users", "2"]
    done = run(
        "locust", *words, "--run-time", "2", "--retry", "never", "--model-name", "x", "--csv", str(tmp_path / "l")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(",") for line in (tmp_path / "l_stats.csv").read_text().splitlines()[1:]]
    seen = {(row[0], row[1]): (int(row[2]), int(row[3])) for row in rows}
    assert seen["Completion", "refused 429"][0] == seen["Completion", "gave up"][0] >= 2
    assert all(failed == 0 for _, failed in seen.values())


@pytest.fixture
def aiohttp_full() -> Iterator[str]:
    """A server on a thread of its own that refuses everything."""
    import threading

    from tests.ports import free_port

    port, loop, ready = free_port(), asyncio.new_event_loop(), threading.Event()
    app = web.Application()

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "1"})

    app.router.add_post("/v1/completions", refuse)
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        ready.set()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(patience(10))
    yield f"http://127.0.0.1:{port}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(patience(10))
