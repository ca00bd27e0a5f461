"""`python -m quire.engine`: one engine process.

main: options --> Server.start: model, logs, metrics page, queue --> Server.serve: warm up, say ready, run the loop
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from quire.engine.bus_thread import BusThread, check_redis
from quire.engine.common import host_resources, logs, open_files, orphans, readiness, settings
from quire.engine.common.deadline import ends_process
from quire.engine.common.errors import OperatorError
from quire.engine.common.tracing import Tracing
from quire.engine.config import EngineConfig
from quire.engine.core.blocks import AccountingError
from quire.engine.executor.base import Executor, ExecutorLost, ScriptedExecutor
from quire.engine.executor.errors import ModelLoadError
from quire.engine.loop import ConfigError, Engine
from quire.engine.observers.metrics import Telemetry
from quire.engine.observers.metrics_page import Page
from quire.engine.observers.pool_state import PoolObserver
from quire.engine.observers.prefix_reports import HeldAdapterReports, HeldPrefixes
from quire.engine.observers.request_log import RequestLog
from quire.engine.observers.turn_record import Observer
from quire.engine.process.hot_prefixes import warm
from quire.engine.process.interpreter import keep_what_is_loaded, tune_interpreter
from quire.engine.process.standby import low_priority, wait_for_turn, without_optional_packages
from quire.engine.process.watchdog import Watchdog
from quire.engine.wire.link import BusDown

log = logging.getLogger("quire.engine")

ORPHAN_S = 15.0  # seconds in addition to grace_s, to return requests to a Redis that may be unreachable
CLOSE_S = 10.0  # maximum seconds for a failed executor to release its device


class Stopwatch:
    """Measures the parts of a start for the log: while an engine restarts, its streams pause."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str, parts: Mapping[str, float] | None = None) -> None:
        """Record the time since the last lap as `name`, minus `parts`, which were measured separately."""
        now = time.perf_counter()
        self.laps |= parts or {}
        self.laps[name], self._last = now - self._last - sum((parts or {}).values()), now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.laps.items())


def code(config: EngineConfig) -> tuple[Callable[[EngineConfig], Executor], Callable[[EngineConfig], Iterable[str]]]:
    """Import the modules that the configuration needs; return (loader of the model, preparation of a spare).

    Raises ModelLoadError if a package is missing; both returned functions raise it, too."""
    if config.executor == "scripted":
        return ScriptedExecutor.load, lambda _: ()
    # Let torch's threads spin for 40 us instead of milliseconds, since our pool and other processes need the cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        with without_optional_packages():
            # torch takes seconds to import, so import it only for a valid configuration.
            from quire.engine.executor import loading, preload
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "ninja"):
            raise
        raise ModelLoadError(f"package {error.name} is missing: pip install 'quire[engine]'") from None

    if config.standby and config.tensor_parallel > 1:
        from quire.engine.executor.ranks.parallel import WaitingRanks

        waiting = WaitingRanks()
        return waiting.load, waiting.prepare
    return loading.load, preload.prepare


def failed(error: Exception) -> int:
    """Print one line with the reason why the engine ends, and return the exit status.

    Logs the traceback of an unexpected exception."""
    if isinstance(error, AccountingError):
        line = f"the block accounting does not balance, which is a bug: {error}"
    elif isinstance(error, (BusDown, ExecutorLost)):  # another process took this engine's name, or the GPU is lost
        line = str(error)
    else:
        log.error("the engine failed", exc_info=error)
        line = f"{type(error).__name__}: {error}; this is a bug, its traceback is in the log"
    print(f"quire engine: {line}", file=sys.stderr)
    return 1


class Server:
    """One engine process, from its options to its end."""

    def __init__(self, config: EngineConfig, watch: Stopwatch) -> None:
        self._config, self._watch = config, watch
        tracing, sample = config.otlp_endpoint, config.trace_sample
        self._tracing = Tracing.start("quire-engine", config.engine_id, tracing, sample, os.environ)
        self._telemetry = Telemetry(config.engine_id, vllm=config.vllm_metrics, tracing=self._tracing)
        self._bus = BusThread(config, self._telemetry)
        self._requests: RequestLog | None = None
        self._held_prefixes: list[Observer] = []  # one HeldPrefixes; empty if no prefixes are published
        self._page: Page | None = None
        self._executor: Executor
        self._engine: Engine

    def start(self) -> bool:
        """Load the model and connect.  Returns False for a spare that is not needed.  Raises OperatorError."""
        config = self._config
        if not config.standby:  # a spare may wait while Redis is away
            self._open_logs()
            asyncio.run(check_redis(config))
        with low_priority() if config.standby else contextlib.nullcontext():
            load, prepare = code(config)
            self._watch.lap("imports")
            if config.standby and not wait_for_turn(prepare(config)):
                return False
        if config.standby:
            log.info("takeover: this spare serves from now on")
            self._watch = Stopwatch()
        self._executor = load(config)
        keep_what_is_loaded()
        if config.standby:
            self._open_logs()
        if not config.standby:  # logged only after all checks that end the process with a one-line error
            log.info("%s", host_resources.read())
        self._telemetry.describe_model(self._executor.info, config)
        observers = [each for each in (self._telemetry, self._requests) if each is not None]
        self._engine = Engine(config, self._executor, self._bus, self._bus, observers=observers)
        self._engine.observers.append(PoolObserver(self._engine.core, self._bus.pool))
        if config.prefix_locality and self._engine.core.pool.caching:
            self._bus.publish_prefixes()
            self._held_prefixes.append(HeldPrefixes(self._engine.core.pool, self._bus))
            self._engine.observers += self._held_prefixes
            if (store := self._executor.adapter_store) is not None:
                self._engine.observers.append(HeldAdapterReports(store, self._bus))
        self._watch.lap("engine", self._executor.start_parts)
        if config.metrics_port:
            check = self._engine.checks.request_check
            self._page = Page(self._telemetry, config.metrics_host, config.metrics_port, check)
        self._bus.start()
        self._watch.lap("queue")
        return True

    def serve(self) -> int:
        """Warm up, then run until drained or failed.  Returns the exit status."""
        config, engine = self._config, self._engine
        for number in orphans.drain_signals():
            signal.signal(number, self._drain)
        watchdog = Watchdog(config.step_timeout_s, lambda: engine.busy_since, self._hung)
        died = True  # unless run() returns
        try:
            warm(engine, self._bus, self._telemetry, self._held_prefixes)
            self._watch.lap("hot prefixes")
            self._report_ready()
            if config.step_timeout_s:
                watchdog.start()
            engine.run()
            died = False
        except Exception as error:
            return failed(error)
        finally:
            watchdog.stop()
            self._close(died)
        return 0

    def _open_logs(self) -> None:
        config = self._config
        try:
            if config.request_log:
                self._requests = RequestLog(Path(config.request_log), config.request_log_mib << 20)
                self._telemetry.dropped_lines["requests"] = self._requests.dropped_lines
        except OSError as error:
            raise ConfigError(f"cannot write a log: {error}") from None

    def _report_ready(self) -> None:
        info, blocks, size = self._executor.info, self._executor.blocks, self._config.block_size
        log.info(
            "%s ready: the KV cache holds %d tokens (%d blocks of %d, %d bytes per token), model fingerprint %.12s",
            *(info.name, blocks * size, blocks, size, info.kv_bytes_per_token, info.fingerprint),
        )
        log.info("started: %s", self._watch)
        memory = self._executor.memory_parts
        if memory:
            log.info("memory: %s", ", ".join(f"{name} {size / (1 << 30):.2f} GiB" for name, size in memory.items()))
        self._telemetry.started(self._watch.laps, takeover=self._config.standby, memory=memory)
        readiness.notify_ready()

    def _drain(self, *_: object) -> None:
        self._engine.draining = True

    def _hung(self, seconds: float) -> None:
        try:
            log.critical("a step has not returned for %.0f s: the engine ends, others resume its requests", seconds)
            self._bus.stop(died=True)
        finally:
            logging.shutdown()
            os._exit(1)  # a normal exit is impossible, because the main thread hangs inside the step

    def _close(self, died: bool) -> None:
        self._bus.stop(died=died)
        if died:
            # close() may raise if the GPU is lost, or never return: a kernel may wait forever for another rank.
            with contextlib.suppress(RuntimeError), ends_process(CLOSE_S):
                self._executor.close()
        else:
            self._executor.close()
        for part in (self._page, self._requests, self._tracing):
            if part is not None:
                part.close()


def main(argv: list[str] | None = None, options: type[EngineConfig] = EngineConfig) -> int:
    """Run one engine; return its exit status.  `options`: a subclass with more choices, for studies.

    0: drained, with unfinished requests back in the queue, or a spare that was not needed.  2, with one line on stderr:
    configuration, model, kernels or Redis make a start impossible.  1: another engine took this engine's name, the GPU
    failed, a step hung, or a bug; this counts as a death for the requests that the engine held.  130: interrupted
    during the start."""
    watch = Stopwatch()
    watch.laps["interpreter"] = time.process_time()  # CPU seconds: no portable call returns the process's start time
    words = sys.argv[1:] if argv is None else argv
    config = settings.load(options, words, os.environ, prog="quire engine", positional="model", table="engine")
    logs.start(config.log_format)
    orphans.end_with_supervisor(config.grace_s + ORPHAN_S)
    open_files.raise_limit()  # weights, metrics connections and Redis may need more than 1,024 open files
    if not config.engine_id:
        config = msgspec.structs.replace(config, engine_id=settings.process_name())
    tune_interpreter()
    try:
        server = Server(config, watch)
        if not server.start():
            return 0
    except OperatorError as error:
        print(f"quire engine: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        return failed(error)
    return server.serve()


if __name__ == "__main__":
    sys.exit(main())
