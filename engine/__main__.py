"""`python -m engine`: one engine process.  Load the configuration, start the executor, connect, run the loop."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from engine.bus_thread import BusThread
from engine.common import logs, open_files, readiness, settings
from engine.common.tracing import Tracing
from engine.config import EngineConfig
from engine.core.blocks import AccountingError
from engine.executor.base import Executor, ExecutorLost, ScriptedExecutor
from engine.executor.errors import ModelLoadError
from engine.hot_prefixes import warm
from engine.loop import ConfigError, Engine
from engine.metrics import Page, PageError, Telemetry
from engine.recorder import Recorder, header
from engine.standby import low_priority, wait_for_turn, without_optional_packages
from engine.watchdog import Watchdog
from engine.wire.bus import BusDown

log = logging.getLogger("quire.engine")

# How long a thread may keep the interpreter from another, seconds.  With Python's own 5 ms the bus thread waits longer
# for its turn beside the executor: median time to first token 47.6 ms, 43.2 with this (36 to 42 streams).
SWITCH_S = 0.0002
# Of the garbage collector.  With Python's own 700 what a step of 1,000 rows makes counts as old by the time it is dealt
# with, so that all sequences were walked through every two seconds: 30 to 130 ms at 1,000 of them.
GC_THRESHOLDS = (10_000, 10, 5)


class Stopwatch:
    """What the parts of a start took, for the log: a crashed engine's streams pause for as long."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str, parts: Mapping[str, float] | None = None) -> None:
        """Everything since the last lap was `name`, but for `parts`, which were timed where they happened."""
        now = time.perf_counter()
        self.laps |= parts or {}
        self.laps[name], self._last = now - self._last - sum((parts or {}).values()), now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.laps.items())


def code(config: EngineConfig) -> tuple[Callable[[EngineConfig], Executor], Callable[[EngineConfig], Iterable[str]]]:
    """What loads the model, with all that it needs imported; and what prepares a spare.  Raises ModelLoadError."""
    if config.executor == "scripted":
        return ScriptedExecutor.load, lambda _: ()
    try:
        with without_optional_packages():
            # torch, seconds to import: only for a configuration found good
            from engine.executor import local, preload
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "ninja"):
            raise
        raise ModelLoadError(f"there is no {error.name} here: pip install 'quire[engine]'") from None
    return local.load, preload.prepare


def recorder(config: EngineConfig, executor: Executor) -> Recorder | None:
    """Of the flight log, if one is wanted.  Raises ConfigError."""
    if not config.flight_log:
        return None
    try:
        return Recorder(Path(config.flight_log), header(config, executor), config.flight_log_mib << 20)
    except OSError as error:
        raise ConfigError(f"flight_log: {error}") from None


def failed(error: Exception) -> int:
    """Tell the operator in one line why the engine ends; an unexpected exception leaves its traceback in the log.  The
    exit status."""
    if isinstance(error, AccountingError):
        line = f"the books of the KV blocks don't balance, which is a bug: {error}"
    elif isinstance(error, (BusDown, ExecutorLost)):  # another process took this engine's name, or the GPU is gone
        line = str(error)
    else:
        log.error("the engine failed", exc_info=error)
        line = f"{type(error).__name__}: {error}; this is a bug, its traceback is in the log"
    print(f"quire engine: {line}", file=sys.stderr)
    return 1


def main(argv: list[str] | None = None) -> int:
    """0 after a drain, with what is not finished back in the queue, and when a standby is not wanted any more; 2 with
    one line on stderr when configuration, model or Redis make a start impossible; 1 when another engine took this one's
    name, the GPU failed, a step hung, or by a bug.  Each 1 counts as a death for the requests it held."""
    watch = Stopwatch()
    # CPU time of this process so far: there is no portable way to ask when it began.
    watch.laps["interpreter"] = time.process_time()
    words = sys.argv[1:] if argv is None else argv
    config = settings.load(EngineConfig, words, os.environ, prog="quire engine", positional="model", table="engine")
    logs.start(config.log_format)
    open_files.raise_limit()  # weights, the metrics page and Redis: 1,024 are few
    if not config.engine_id:
        config = msgspec.structs.replace(config, engine_id=settings.process_name())

    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GC_THRESHOLDS)
    tracing = Tracing.start("quire-engine", config.engine_id, config.otlp_endpoint, config.trace_sample, os.environ)
    telemetry = Telemetry(config.engine_id, vllm=config.vllm_metrics, tracing=tracing)
    bus = BusThread(config, telemetry)
    page: Page | None = None
    flight: Recorder | None = None
    try:
        with low_priority() if config.standby else contextlib.nullcontext():
            load, prepare = code(config)
            watch.lap("imports")
            if config.standby and not wait_for_turn(prepare(config)):
                return 0
        if config.standby:
            log.info("takeover: this spare serves from now on")
            watch = Stopwatch()
        executor = load(config)
        flight = recorder(config, executor)
        engine = Engine(config, executor, bus, bus, telemetry, flight=flight)
        watch.lap("engine", executor.start_parts)
        if config.metrics_port:
            page = Page(telemetry, config.metrics_host, config.metrics_port)
        bus.start()
        watch.lap("queue")
    except (ModelLoadError, ConfigError, BusDown, PageError) as error:
        print(f"quire engine: {error}", file=sys.stderr)
        return 2

    def drain(*_: object) -> None:
        engine.draining = True

    def hung(seconds: float) -> None:
        try:
            log.critical("a step has not returned for %.0f s: the engine ends, its requests move on", seconds)
            bus.stop(died=True)
        finally:
            os._exit(1)  # the main thread is inside the step

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    watchdog = Watchdog(config.step_timeout_s, lambda: engine.busy_since, hung)
    died = True  # however it ends, but for a drain
    try:
        warm(engine, bus)
        watch.lap("hot prefixes")
        log.info(
            "%s ready: %d KV blocks of %d tokens, %d bytes a token, fingerprint %.12s",
            executor.info.name,
            executor.blocks,
            config.block_size,
            executor.info.kv_bytes_per_token,
            executor.info.fingerprint,
        )
        log.info("started: %s", watch)
        telemetry.started(watch.laps, takeover=config.standby)
        readiness.notify_ready()
        if config.step_timeout_s:
            watchdog.start()
        engine.run()
        died = False
    except Exception as error:
        return failed(error)
    finally:
        watchdog.stop()
        bus.stop(died=died)
        with contextlib.suppress(*([RuntimeError] if died else [])):  # of a GPU that is lost
            executor.close()
        if page is not None:
            page.close()
        if flight is not None:
            flight.close()
        tracing.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
