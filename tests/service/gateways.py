"""Gateways of tests: on the test's own event loop, or on a thread whose turns are measured."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import ClientSession

from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.messages import Sampling
from quire.service.api.tenants import Tenants
from quire.service.app import Gateway
from quire.service.common.metrics import Telemetry
from quire.service.config import GatewayConfig
from quire.service.delivery.streams import Streams
from quire.service.text.tokenizer import Tokenizer
from tests.pace import wait_until
from tests.service.fakes import Served

START_S = 30.0


@contextlib.asynccontextmanager
async def served(
    config: GatewayConfig, tokenizer: Tokenizer, gateway_id: str = "g0", defaults: Sampling | None = None
) -> AsyncIterator[Served]:
    """A gateway on a free port.  A request still open at the end is an error."""
    side = GatewaySide(
        config.redis_url, gateway_id, namespace=config.namespace, retain_s=config.retain_s, grace_s=config.resume_s
    )
    await side.open()
    telemetry = Telemetry(gateway_id, model="tiny", vllm=config.vllm_metrics)
    streams = Streams(side, config, telemetry)
    await streams.start()
    tenants = Tenants(config.api_keys, config.tenants, config.admin_keys)
    gateway = Gateway(config, tokenizer, streams, telemetry, tenants, gateway_id, defaults=defaults)
    runner = gateway.runner(shutdown_timeout=0.5)
    await runner.setup()
    assert runner.server is not None
    port = await gateway.connections.listen(runner.server, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    session = ClientSession(base_url=url)
    yield Served(url, gateway, streams, session, runner)
    await session.close()
    gateway.connections.stop_listening()
    await runner.cleanup()
    await streams.stop()
    await side.close()
    assert len(streams) == 0


class MeasuredLoop(asyncio.SelectorEventLoop):
    """An event loop that knows the CPU time of its longest turn: what other threads and processes take is no part."""

    longest_s = 0.0

    def _run_once(self) -> None:
        begin = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest_s = max(self.longest_s, time.thread_time() - begin)


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts the lines of Python of its longest turn: no machine makes them more."""

    lines = longest = 0
    _traces = False

    def _run_once(self) -> None:
        if not self._traces:
            self._traces = True
            sys.settrace(self._count)
        self.lines = 0
        super()._run_once()  # type: ignore[misc]
        self.longest = max(self.longest, self.lines)

    def _count(self, frame: types.FrameType, event: str, argument: object) -> Any:
        self.lines += event == "line"
        return self._count


class MeasuredGateway:
    """A gateway on a thread of its own."""

    def __init__(
        self, config: GatewayConfig, tokenizer: Tokenizer, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """`loop`: to run on; None: a MeasuredLoop."""
        self._config, self._tokenizer = config, tokenizer
        self.loop = loop or MeasuredLoop()
        self._up, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failure: BaseException | None = None
        self.served: Served

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:  # for the thread that waits for it
            self._failure = error

    async def _serve(self) -> None:
        async with served(self._config, self._tokenizer) as self.served:
            self._up.set()
            await self._stop.wait()

    def __enter__(self) -> MeasuredGateway:
        self._thread.start()
        wait_until(lambda: self._up.is_set() or self._failure is not None, START_S)
        if self._failure is not None:
            raise RuntimeError("the gateway did not start") from self._failure
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.loop.close()

    @contextlib.contextmanager
    def measured(self) -> Iterator[list[float]]:
        """Append the CPU seconds of the loop's longest turn within the context, without garbage collections."""
        found: list[float] = []
        assert isinstance(self.loop, MeasuredLoop)
        gc.collect()
        gc.disable()
        try:
            self.loop.longest_s = 0.0
            yield found
            found.append(self.loop.longest_s)
        finally:
            gc.enable()


def settings(**changes: Any) -> GatewayConfig:
    """Options of a gateway in tests."""
    return GatewayConfig(**{"port": 0, "fleet_s": 0.02, "late_wait_s": 5.0, **changes})
