"""The engine's end of the bus, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from engine.config import EngineConfig
from engine.core.limits import Outputs
from engine.metrics import Telemetry
from engine.orders import Audit, Order, Report, Resume, merged, on_own_clock, without
from engine.wire.bus import BusDown, EngineSide
from engine.wire.hot_prefix_store import Reuse
from engine.wire.keys import STALE_MS
from engine.wire.messages import Abort, Delta, TokenBatch

log = logging.getLogger("quire.engine")
T = TypeVar("T")

BUFFER_TOKENS = 2**18  # tokens waiting for Redis, all requests together: some 70 MB
LAST_WORDS_S = 5.0  # an engine that goes waits so long for a Redis that is away
BELL_PAUSE_S = 1.0  # after an error on it, before the bell is listened to again


class BusThread:
    """The engine's end of the bus on a thread of its own: Inbox and Outbox of an Engine.

    Each time the loop has published, or the bell rings, and every second in any case (a third of STALE_MS, or of a
    shorter lease), one exchange sends what has gathered and brings what there is room for.  So a long step does not
    make the engine look dead."""

    def __init__(self, config: EngineConfig, telemetry: Telemetry | None = None) -> None:
        """`telemetry`: None for figures that nobody asks for."""
        self.relieved = False
        self._config = config
        self._telemetry = telemetry or Telemetry(config.engine_id)
        self._orders: queue.SimpleQueue[Order | Audit] = queue.SimpleQueue()
        self._outputs: deque[tuple[Outputs, int]] = deque()  # and how many requests had been dropped by then
        # Lost requests whose tokens may still come, because the loop has not heard of it: id -> the running number of
        # the loss.  They must not be sent, for this engine holds its lease again, and may even have the request again.
        self._lost: dict[str, int] = {}
        self._losses = 0
        self._put = self._sent = 0  # deltas since start: each is written by one of the two threads
        self._report: Report | None = None
        self._findings: deque[tuple[str, str]] = deque()  # of ordered audits, not yet said
        self._reused: deque[tuple[Reuse, ...]] = deque(maxlen=4)  # the last ones not yet said
        self._claimed: deque[tuple[int, int]] = deque()  # (running number, prompt tokens) not yet in a report
        self._claims = 0
        self._stopping = False
        self._died = False  # the engine failed: nothing more is claimed
        self._bus: EngineSide  # since it is open
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bus", daemon=True)
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Connect.  Raises BusDown."""
        self._thread.start()
        if (error := self._opened.get()) is not None:
            self._thread.join()
            raise error

    def stop(self, *, died: bool = False) -> None:
        """Send what has gathered, give the lease up.  Without Redis what was not sent is lost, which harms nobody: no
        client has seen it, and the engine that takes over sends it again.  `died`: see EngineSide.close()."""
        self._died = died
        self._stopping = True
        self._ring()
        self._thread.join(LAST_WORDS_S)
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join()

    def drain(self, wait_s: float) -> list[Order | Audit]:
        if self._failure is not None:
            raise self._failure
        orders: list[Order | Audit] = []
        try:
            orders.append(self._orders.get(timeout=wait_s) if wait_s else self._orders.get_nowait())
            while True:
                orders.append(self._orders.get_nowait())
        except queue.Empty:
            return orders

    @property
    def full(self) -> bool:
        return self._put - self._sent >= BUFFER_TOKENS

    def put(self, outputs: Outputs, report: Report) -> None:
        if outputs.deltas or outputs.finished:
            self._put += sum(map(len, outputs.deltas.values()))
            self._outputs.append((outputs, report.dropped))
        self._report = report
        self._findings.extend(report.audited)
        if report.reused:
            self._reused.append(report.reused)
        self._ring()

    def wanted(self) -> bool:
        """Whether a request waits for whom the engines there have no room.  Not while Redis is away: what waits there
        can't be had."""
        try:
            return self._ask(self._bus.manifest.wanted())
        except BusDown:
            return False

    def hottest(self, fingerprint: str) -> list[tuple[float, bytes]]:
        """The manifest, as Manifest.hottest() has it; to be followed by warmed().  Raises BusDown."""
        return self._ask(self._bus.manifest.hottest(fingerprint))

    def warmed(self) -> None:
        """The engine has survived what hottest() brought."""
        with contextlib.suppress(BusDown):  # then the next start under this name warms nothing
            self._ask(self._bus.manifest.warmed())

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the bus thread do it, and wait."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended; the next drain() says why
            self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._serving = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(self._serving)
        except BaseException as error:
            self._failure = error
            self._opened.put(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        config = self._config
        bus = EngineSide(config.redis_url, config.engine_id, namespace=config.namespace, lease_ms=config.lease_ms)
        await bus.open()
        self._bus = bus
        self._opened.put(None)
        bell = asyncio.create_task(self._listen(bus))
        telling = asyncio.create_task(self._tell(bus))  # beside the exchanges: it must not delay one
        try:
            while not (self._stopping and not self._outputs):
                await self._wait(min(config.lease_ms, STALE_MS) / 3000)
                if self._report is not None:
                    await self._exchange(bus, self._report)
                    while self._findings:
                        with contextlib.suppress(BusDown):  # whoever asked has given up by then
                            await bus.audited(*self._findings.popleft())
                    if self._reused and telling.done():
                        telling = asyncio.create_task(self._tell(bus))
                    if self._report.load.draining:
                        self.relieved = await self._could_go_on_elsewhere(bus, self._report.load.fingerprint)
            await telling
            await self._tell(bus)
        finally:
            bell.cancel()
            telling.cancel()
            await bus.close(died=self._died or not self._stopping)  # this thread's failure is the engine's

    async def _tell(self, bus: EngineSide) -> None:
        """Report what was reused, if anything was.  What gets lost on the way was not hot, or comes again."""
        while self._reused and self._report is not None:
            try:
                await bus.manifest.reused(self._report.load.fingerprint, self._reused.popleft(), bus.clock.redis_ms())
            except Exception as error:
                log.warning("hot prefixes could not be reported: %s", error)

    async def _could_go_on_elsewhere(self, bus: EngineSide, fingerprint: str) -> bool:
        try:
            return any(load.fingerprint == fingerprint and not load.draining for load in await bus.others())
        except BusDown:
            return False

    async def _wait(self, seconds: float) -> None:
        timer = self._loop.call_later(seconds, self._wake.set)
        await self._wake.wait()
        timer.cancel()
        self._wake.clear()

    async def _listen(self, bus: EngineSide) -> None:
        while True:
            try:
                await bus.bell()
            except Exception:  # exchanges go on without it, at a third of the lease, and say what is wrong with Redis
                log.exception("the bell of the queue cannot be heard, trying again in %g s", BELL_PAUSE_S)
                await asyncio.sleep(BELL_PAUSE_S)
            self._wake.set()

    async def _exchange(self, bus: EngineSide, report: Report) -> None:
        deltas: dict[str, list[Delta]] = {}
        finished: list[str] = []
        steps, count = len(self._outputs), 0
        for _ in range(steps):
            outputs, dropped = self._outputs.popleft()
            count += sum(map(len, outputs.deltas.values()))
            if self._lost:
                self._lost = {name: number for name, number in self._lost.items() if number > dropped}
                outputs = without(outputs, self._lost)
            finished += outputs.finished
            for gateway, said in outputs.deltas.items():
                deltas.setdefault(gateway, []).extend(said)
        while self._claimed and self._claimed[0][0] <= report.accepted:
            self._claimed.popleft()
        taken = sum(tokens for _, tokens in self._claimed)
        load, room_tokens = report.load, max(0, report.room_tokens - taken)
        if taken:
            load = msgspec.structs.replace(load, yield_tokens=max(0, load.yield_tokens - taken))
        room_requests = max(0, report.room_requests - len(self._claimed))
        if self._died:  # the report was made before
            room_tokens = room_requests = 0
            load = msgspec.structs.replace(load, yield_tokens=0)
        batches = [
            (gateway, TokenBatch(self._config.engine_id, merged(said) if steps > 1 else said, load))
            for gateway, said in deltas.items()
        ]
        began = time.monotonic()
        claimed = await bus.exchange(batches, finished, load, room_tokens, room_requests)
        self._telemetry.exchanged(time.monotonic() - began, bus.queue_share, len(claimed.resumed))
        self._telemetry.clock_skew_s = bus.clock.skew_s
        self._sent += count
        for request_id in claimed.lost:  # before what is claimed: it may be the same request
            self._losses += 1
            self._lost[request_id] = self._losses
            self._orders.put(Abort(request_id, lost=True))
        for request in claimed.generates:
            request = on_own_clock(request, bus.clock)
            self._claims += 1
            so_far = claimed.resumed.get(request.id, [])
            tokens = len(request.token_ids) + sum(len(said.token_ids) for said in so_far if said.finish is None)
            self._claimed.append((self._claims, tokens))
            known = [said.token_ids if said.finish is None else None for said in so_far]
            self._orders.put(Resume(request, known) if known else request)
        for order in claimed.aborts:
            self._orders.put(order)
        for name in claimed.audits:
            self._orders.put(Audit(name))
