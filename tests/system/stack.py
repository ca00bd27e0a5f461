"""A complete server inside the test process: real Redis, engine and gateway code on separate threads, real HTTP.

Processes take seconds to start and are used where a process is what is tested (tests/system/processes.py).  For all
other tests this stack runs the same code in a tenth of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from quire.engine.bus_thread import BusThread
from quire.engine.core.plan import StepResult
from quire.engine.executor.base import Executor, ScriptedExecutor
from quire.engine.executor.loading import load
from quire.engine.loop import Engine
from quire.engine.observers.pool_state import PoolObserver
from quire.engine.process.hot_prefixes import warm
from quire.loadtest.studies.baselines import BaselineConfig
from quire.service.app import serve
from quire.service.config import GatewayConfig
from tests.pace import Patience, patience
from tests.ports import free_port

# Options of an engine whose claims only `step_tokens` bounds.  By default measured step times bound them as well: on a
# slow machine the engine then claims too little to fill its pool, and a test of a full pool tests nothing.
CLAIMS_BY_TOKENS = {"itl_stretch": 0.0, "step_target_s": 0.0}


class EngineThread:
    """One engine: the loop of `python -m quire.engine` on a thread."""

    def __init__(self, redis_url: str, namespace: str, name: str, checkpoint: Path, **options: Any) -> None:
        self.config = msgspec.convert(
            {
                "model": str(checkpoint),
                "redis_url": redis_url,
                "namespace": namespace,
                "engine_id": name,
                "dtype": "float32",
                "kv_blocks": 256,
                "max_seqs": 40,
                "threads": 1,  # tiny matrices: a second thread would spend more on barriers than it saves
                "check_accounting": True,
                "poison_free_blocks": True,
                **options,
            },
            BaselineConfig,
        )
        self.executor: Executor = (
            ScriptedExecutor.load(self.config) if self.config.executor == "scripted" else load(self.config)
        )
        self.bus = BusThread(self.config)
        self.engine = Engine(self.config, self.executor, self.bus, self.bus)
        self.engine.observers.append(PoolObserver(self.engine.core, self.bus.pool))
        self.bus.start()
        try:
            warm(self.engine, self.bus)
        except BaseException:
            self.bus.stop()
            raise
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        """Drain, and fail if the block accounting does not balance at the end."""
        self.engine.draining = True
        self._thread.join(timeout=patience(60))
        self.bus.stop()
        self.executor.close()
        if self.failure is not None:
            raise self.failure
        self.engine.core.auditor.whole()
        pool = self.engine.core.pool
        assert pool.available == pool.total, "a block leaked"


class GatewayThread:
    """One gateway: `quire.service.app.serve` on a thread with its own event loop."""

    def __init__(self, redis_url: str, namespace: str, name: str, checkpoint: Path, **options: Any) -> None:
        self.port = free_port()
        config = msgspec.convert(
            {
                "model": str(checkpoint),
                "served_name": "tiny",
                "redis_url": redis_url,
                "namespace": namespace,
                "gateway_id": name,
                "port": self.port,
                "drain_s": 10.0,
                **options,
            },
            GatewayConfig,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(config,), name=name)
        self._thread.start()

    def _run(self, config: GatewayConfig) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(serve(config, self._stopping))
        except BaseException as error:
            self.failure = error
        finally:
            self._loop.close()

    def wait_ready(self, seconds: float = 200.0) -> None:
        bound = Patience(seconds)
        while True:
            if self.failure is not None:
                raise self.failure
            try:
                with urllib.request.urlopen(f"{self.url}/ready"):
                    return
            except urllib.error.HTTPError as error:
                error.close()
            except OSError:
                pass
            assert bound.lasts(), "the gateway did not become ready"
            time.sleep(0.05)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has failed
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout=patience(30))
        if self.failure is not None:
            raise self.failure


class Stack:
    """`engines` engines and `gateways` gateways with one Redis."""

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        checkpoint: Path,
        *,
        engines: int = 1,
        gateways: int = 1,
        gateway_options: dict[str, Any] | None = None,
        **engine_options: Any,
    ) -> None:
        self.engines: list[EngineThread] = []
        self.gateways: list[GatewayThread] = []
        try:
            for i in range(engines):
                self.engines.append(EngineThread(redis_url, namespace, f"engine{i}", checkpoint, **engine_options))
            for i in range(gateways):
                name = f"gateway{i}"
                self.gateways.append(GatewayThread(redis_url, namespace, name, checkpoint, **(gateway_options or {})))
            for gateway in self.gateways:
                gateway.wait_ready()
        except BaseException:
            # No thread outlives its test: one that asks Redis again for ever would use `random` in the tests of others.
            with contextlib.suppress(Exception):  # what failed first is the news
                self.stop()
            raise

    @property
    def url(self) -> str:
        return self.gateways[0].url

    @property
    def core(self) -> Any:
        return self.engines[0].engine.core

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop every gateway, then every engine, also if one of them has failed."""
        with contextlib.ExitStack() as last:
            for stop in [part.stop for part in self.engines] + [part.stop for part in self.gateways]:
                last.callback(stop)  # the last one is the first to run


@contextlib.contextmanager
def a_long_step(executor: Executor) -> Iterator[threading.Event]:
    """Make the next step last until the end of this context.  Yields an event that is set when the step begins."""
    inside, over, collect = threading.Event(), threading.Event(), executor.collect

    def slowly() -> StepResult:
        inside.set()
        over.wait()
        return collect()

    executor.collect = slowly  # type: ignore[method-assign]
    try:
        yield inside
    finally:
        over.set()
