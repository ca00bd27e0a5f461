"""A gateway over an engine that writes answers from a script, for agent programs that must get a tool call.

    python -m tests.clients.scripted [folder]    prints its URL; ends when its standard input does

The model writes the notation of its chat template, as `script.py` says: while a prompt ends in a user's message, and a
tool of `SHELLS` is in it, a call of that tool; after the tool's result `FINAL`.  `GET /calls` lists the requests so
far: method, path, status, the header `x-unknown-fields`, the bodies of request and answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.messages import Finish, Generate
from quire.service.api.tenants import Tenants
from quire.service.app import Gateway
from quire.service.common.metrics import Telemetry
from quire.service.config import GatewayConfig
from quire.service.delivery.streams import Streams
from quire.service.text.tokenizer import Tokenizer
from tests.clients.script import MODEL, answer
from tests.service.fakes import TOOLS_TEMPLATE, FakeEngine, byte_level, with_template

CONTEXT = 2**20  # tokens: an agent's first prompt has tens of thousands of this small vocabulary
LIMITS = {"grammars": True, "max_model_len": CONTEXT, "vocab_size": 600, "total_blocks": 2**17, "free_blocks": 2**17}
HOP = ("connection", "transfer-encoding", "content-length", "host", "keep-alive")  # headers of one connection


class Recorder:
    """A proxy before the gateway that notes each request."""

    def __init__(self, target: str) -> None:
        self.calls: list[dict[str, Any]] = []
        self._target = target

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on, and its answer back as it comes."""
        if request.path == "/calls":
            return web.json_response(self.calls)
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        call: dict[str, Any] = {
            "method": request.method,
            "path": request.path_qs,
            "body": body.decode("utf-8", "replace"),
        }
        self.calls.append(call)
        async with (
            ClientSession(auto_decompress=False, timeout=ClientTimeout(total=None)) as session,
            session.request(request.method, self._target + request.path_qs, data=body, headers=headers) as reply,
        ):
            call |= {"status": reply.status, "unknown": reply.headers.get("x-unknown-fields", "")}
            response = web.StreamResponse(status=reply.status)
            for name, value in reply.headers.items():
                if name.lower() not in HOP:
                    response.headers[name] = value
            await response.prepare(request)
            kept = b""
            async for chunk in reply.content.iter_any():
                kept += chunk
                await response.write(chunk)
            call["answer"] = kept.decode("utf-8", "replace")
        return response


@contextlib.asynccontextmanager
async def gateway(folder: Path, redis_url: str, tokenizer: Tokenizer) -> AsyncIterator[str]:
    """A context with a gateway; yields its URL."""
    config = GatewayConfig(
        model=str(folder), served_name=MODEL, namespace="scripted", redis_url=redis_url, max_prompt_tokens=CONTEXT
    )
    side = GatewaySide(redis_url, "g0", namespace=config.namespace, retain_s=60.0, grace_s=60.0)
    await side.open()
    telemetry = Telemetry("g0", model=MODEL, vllm=False)
    streams = Streams(side, config, telemetry)
    await streams.start()
    served = Gateway(config, tokenizer, streams, telemetry, Tenants(), "g0")
    runner = served.runner()
    await runner.setup()
    assert runner.server is not None
    port = await served.connections.listen(runner.server, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
        await streams.stop()
        await side.close()


async def serve(folder: Path) -> None:
    """Serve until standard input ends."""
    tokenizer = Tokenizer(str(folder))
    (stop,) = tokenizer._encode("<|im_end|>", special=False)

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        prompt = tokenizer.text_of(generate.token_ids, skip_special=False)
        return [*tokenizer._encode(answer(prompt, generate.sampling.grammar), special=False), stop], Finish(
            "stop", stop
        )

    with EmbeddedRedis() as redis:
        async with gateway(folder, redis.url, tokenizer) as url, FakeEngine(redis.url, "scripted", script) as fake:
            fake.load_changes, fake.free_tokens = dict(LIMITS), CONTEXT * 64
            recorder = Recorder(url)
            app = web.Application(client_max_size=2**28)
            app.router.add_route("*", "/{path:.*}", recorder.handle)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            print(f"http://{host}:{port}", flush=True)
            await asyncio.to_thread(sys.stdin.read)
            await runner.cleanup()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        made = sys.argv[1:] or [str(with_template(byte_level(Path(scratch) / MODEL), TOOLS_TEMPLATE))]
        asyncio.run(serve(Path(made[0])))


if __name__ == "__main__":
    main()
