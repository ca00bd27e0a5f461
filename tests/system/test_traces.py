"""One trace of one request through real processes, over an engine's death and a client's return; and its log lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.otlp import Collector, Seen
from tests.pace import paced_ms, patience
from tests.ports import free_port
from tests.system.processes import ENVIRONMENT, QUIRE, Process, ending, fleet_until, wait_until_ready

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]
LIMIT_S = 250.0  # generous: the machine may be busy
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "nobody but the model reads this"
TOKENS = 600


async def listen(response: aiohttp.ClientResponse, most: int | None = None) -> tuple[list[str], bool]:
    """Event ids, up to `most` of them; and whether the answer ended."""
    found: list[str] = []
    async for line in response.content:
        assert b'"error":' not in line, line
        if line.startswith(b"id: "):
            found.append(line[4:].decode().strip())
        if line.startswith(b"data: [DONE]"):
            return found, True
        if len(found) == most:
            break
    return found, False


class Deployment:
    """Scripted engines and a gateway that send their spans to a collector."""

    def __init__(
        self, collector: Collector, redis_url: str, namespace: str, folder: Path, checkpoint: Path, ends: list[Process]
    ) -> None:
        self.redis_url, self.namespace, self.ends, self._folder = redis_url, namespace, ends, folder
        self._shared = [
            str(checkpoint),
            f"--redis-url={redis_url}",
            f"--namespace={namespace}",
            "--served-name=tiny",
            f"--otlp-endpoint={collector.url}",
            "--log-format=json",
        ]
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.gateway = self._start(
            "gateway", "gateway", f"--port={port}", "--gateway-id=g", f"--resume-s={patience(90)}"
        )

    def _start(self, name: str, kind: str, *options: str) -> Process:
        env = {
            **{name: value for name, value in ENVIRONMENT.items() if not name.startswith("OTEL_")},
            "OTEL_BSP_SCHEDULE_DELAY": "100",  # ms; what waits for its batch when an engine is killed is lost
            "NO_PROXY": "127.0.0.1",
        }
        process = Process(self._folder / f"{name}.log", kind, *self._shared, *options, command=QUIRE, env=env)
        self.ends.append(process)
        return process

    async def engine(self, name: str, step_ms: int) -> Process:
        scripted = ("--executor=scripted", f"--scripted-step-ms={step_ms}", "--max-model-len=2048")
        process = self._start(name, "engine", f"--engine-id={name}", *scripted, f"--lease-ms={paced_ms(1000)}")
        await fleet_until(
            self.redis_url,
            self.namespace,
            lambda fleet: name in {load.engine for load in fleet.engines},
            LIMIT_S,
        )
        wait_until_ready(self.url, LIMIT_S)
        return process

    def lines(self, logger: str) -> list[dict[str, Any]]:
        """Of the gateway's log."""
        found = [json.loads(line) for line in self.gateway.said().splitlines()]
        return [line for line in found if line["logger"] == logger]


@pytest.mark.timeout(500)
async def test_one_trace_and_one_line_for_each_request(
    redis_server: EmbeddedRedis, namespace: str, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    timeout = aiohttp.ClientTimeout(total=patience(LIMIT_S))
    with Collector() as collector, ending([]) as ends:
        there = Deployment(collector, redis_server.url, namespace, tmp_path, checkpoint("llama"), ends)
        first = await there.engine("e1", step_ms=50)  # so half a minute in all
        async with aiohttp.ClientSession(there.url, timeout=timeout) as client:
            body = {"model": "tiny", "prompt": SECRET, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
            headers = {"traceparent": TRACEPARENT, "X-Request-Id": "mine-1", "X-Resumable": "1"}
            async with client.post("/v1/completions", json=body, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "mine-1"
                had, _ = await listen(response, 20)
            collector.wait_for(lambda: bool(collector.named("prefill")), LIMIT_S)
            first.kill()
            second = await there.engine("e2", step_ms=1)
            back = {"traceparent": OTHER, "X-Request-Id": "mine-2", "Last-Event-ID": had[-1]}
            async with client.post("/v1/completions", json=body, headers=back) as response:
                assert response.status == 200, await response.text()
                assert (await listen(response))[1]
            collector.wait_for(lambda: len({span.span_id for span in collector.spans}) == 7, LIMIT_S)
            check_trace(collector.spans)

            collector.answering.clear()  # the trace collector hangs, without effect on requests
            async with client.post("/v1/completions", json=body | {"max_tokens": 3, "stream": False}) as response:
                assert response.status == 200, await response.text()
            collector.wait_for(lambda: collector.asked > 0, patience(LIMIT_S))
        there.gateway.wait_for("usage")
        for process in (second, there.gateway):
            process.popen.terminate()
        for process in (second, there.gateway):
            assert process.popen.wait(patience(LIMIT_S)) == 0, process.said()
        check_lines(there)
    everything = "".join(str(span.attributes) for span in collector.spans)
    assert SECRET not in everything + "".join(process.said() for process in ends)


def check_trace(spans: list[Seen]) -> None:
    def one(name: str, service: str) -> Seen:
        (found,) = [span for span in spans if (span.name, span.service) == (name, service)]
        return found

    assert {span.trace_id for span in spans} == {TRACEPARENT.split("-")[1]}
    root, comeback = one("text_completion tiny", "quire-gateway"), one("resume tiny", "quire-gateway")
    admission = one("admission", "quire-gateway")
    queue, prefill, resume, decode = (one(name, "quire-engine") for name in ("queue", "prefill", "resume", "decode"))
    assert root.parent_id == TRACEPARENT.split("-")[2]
    assert {span.parent_id for span in (admission, queue, prefill, resume, decode, comeback)} == {root.span_id}
    assert comeback.links == (OTHER.split("-")[1],)
    assert (queue.instance, prefill.instance) == ("e1", "e1")  # what e1 decoded went with it
    assert (resume.instance, decode.instance) == ("e2", "e2")
    assert (root.kind, comeback.kind, decode.kind) == ("SERVER", "SERVER", "INTERNAL")
    # Both machines' clocks are this one's; the queue time is an integer of milliseconds.
    order = [root.start_ns, admission.start_ns, prefill.start_ns, prefill.end_ns, resume.start_ns, decode.start_ns]
    assert order == sorted(order)
    assert root.start_ns - 1e7 < queue.start_ns < queue.end_ns <= prefill.start_ns + 1e6
    said = root.attributes
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny"
    assert said["gen_ai.request.max_tokens"] == decode.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert said["gen_ai.request.stream"] is True
    assert said["gen_ai.usage.input_tokens"] == prefill.attributes["gen_ai.usage.input_tokens"] > 1
    assert said["gen_ai.response.time_to_first_chunk"] > 0
    assert said["gen_ai.response.id"] == comeback.attributes["gen_ai.response.id"]
    assert (said["quire.request_id"], comeback.attributes["quire.request_id"]) == ("mine-1", "mine-2")
    assert (root.failed, said["error.type"]) == (True, "cancelled")  # its client left
    assert comeback.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert not comeback.failed
    assert decode.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert decode.attributes["quire.last_step"] > decode.attributes["quire.first_step"]
    assert resume.attributes["quire.tokens_to_compute"] > prefill.attributes["gen_ai.usage.input_tokens"]
    for span in (queue, prefill, resume, decode):
        assert span.attributes["gen_ai.request.id"] == f"{said['gen_ai.response.id']}.0"


def check_lines(there: Deployment) -> None:
    left, back, whole = there.lines("quire.request")
    trace_id = TRACEPARENT.split("-")[1]
    assert (left["request_id"], left["outcome"], left["status"]) == ("mine-1", "cancelled", 499)
    assert (back["request_id"], back["outcome"], back["status"]) == ("mine-2", "ok", 200)
    assert left["id"] == back["id"]
    assert left["trace_id"] == back["trace_id"] == trace_id != whole["trace_id"]
    assert back["resumed"] is True
    assert back["finish"] == whole["finish"] == "length"
    assert left["output_tokens"] + back["output_tokens"] >= TOKENS
    assert whole["output_tokens"] == 3
    for line in (left, whole):
        assert line["tenant"] == "default"
        assert line["prompt_tokens"] > 1
        assert 0 < line["first_token_s"] <= line["seconds"]
        assert line["token_s"] > 0
    assert [line["generated_tokens"] for line in there.lines("quire.usage")] == [TOKENS, 3]
