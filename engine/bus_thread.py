"""The bus thread: syncs with Redis, and is the inbox and outbox of an Engine.  A *command* is a control message to the
engine: a request, an abort, a reset of the prefix cache.

    Redis <==sync==> BusThread ==commands==> drain()   the loop's thread
                                   <=outputs== put()

The two threads pass commands and outputs through queues, so a slow Redis never delays a step, and a long step never
delays the renewal of the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from quire.engine.commands import Command, Report, ResetPrefixCache, Resume, merged, on_own_clock, without
from quire.engine.config import EngineConfig
from quire.engine.core.limits import Outputs
from quire.engine.observers.metrics import Telemetry
from quire.engine.observers.pool_state import PoolPublisher
from quire.engine.observers.prefix_reports import PromptBacklog
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.layout import STALE_MS
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Abort, Delta, EngineLoad, HotPrefix, TokenBatch
from quire.engine.wire.prefixes import PrefixReport
from quire.engine.wire.records import SyncReply

log = logging.getLogger("quire.engine")
T = TypeVar("T")

BUFFER_DELTAS = 2**18  # maximum deltas buffered while Redis is unreachable: about 70 MB
STOP_S = 5.0  # seconds that stop() waits for an unreachable Redis
WAKEUP_PAUSE_S = 1.0  # pause after an error on the wake-up channel's connection


def engine_side(config: EngineConfig) -> EngineSide:
    """Return the engine's side of the bus, not connected.  Raises BusDown for a malformed URL."""
    return EngineSide(
        config.redis_url,
        config.engine_id,
        namespace=config.namespace,
        lease_ms=config.lease_ms,
        late_share=config.late_share,
    )


async def check_redis(config: EngineConfig) -> None:
    """Connect and disconnect again, so that a wrong address is known before the model loads.

    Raises BusDown, or VersionMismatch when processes of another version use this namespace."""
    bus = engine_side(config)
    try:
        await bus.check()
    finally:
        await bus.close()


class BusThread:
    """Sends outputs to Redis, and receives requests and control messages.

    A sync sends the outputs since the last one, and claims requests for the engine's free capacity.  Syncs run after
    each turn that published, after each wake-up, and at least three times per STALE_MS (3 s) or per shorter lease."""

    returns = True

    def __init__(self, config: EngineConfig, telemetry: Telemetry | None = None) -> None:
        """`telemetry`: None if no metrics are served."""
        self.relieved, self.queued = False, 0  # values of the properties of Inbox
        self._config = config
        self._telemetry = telemetry or Telemetry(config.engine_id)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._outputs: deque[tuple[Outputs, int]] = deque()  # (outputs, number of requests dropped by the loop by then)
        # Reassigned requests for which the loop may still publish tokens, because it has not processed the abort yet:
        # id -> sequence number of the reassignment.  These tokens must not be sent: the engine has a new lease, and may
        # even have claimed the same request again.
        self._lost: dict[str, int] = {}
        self._losses = 0  # number of reassignments since start
        self._put = self._sent = 0  # deltas since start; the loop writes `_put`, the bus thread writes `_sent`
        self._report: Report | None = None
        self._hot: tuple[str, Sequence[HotPrefix]] | None = None  # (model fingerprint, hot prefixes to write)
        # (digests gained, digests lost) of the prefix cache; None: the engine publishes no prefixes.
        self._prefixes: deque[tuple[list[bytes], list[bytes]]] | None = None
        self._backlog = PromptBacklog()
        self._retry_s: float | None = None  # seconds until the next sync, after requests were left to other engines
        self._claimed: deque[tuple[int, int]] = deque()  # (number, prompt tokens) of claims not in a report yet
        self._claims = 0  # number of claims since start
        self._stopping = False
        self._died = False  # the engine has failed, so it claims no further request
        self._bus: EngineSide  # once it is open
        self._loop = asyncio.new_event_loop()
        self.pool = PoolPublisher(config.engine_id, self._loop)
        self._wake = asyncio.Event()
        self._opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bus", daemon=True)
        self._failure: BaseException | None = None

    # -- called by the loop's thread

    def start(self) -> None:
        """Connect.  Raises BusDown."""
        self._thread.start()
        if (error := self._opened.get()) is not None:
            self._thread.join()
            raise error

    def stop(self, *, died: bool = False) -> None:
        """Send the remaining outputs, then give up the lease.  `died`: see EngineSide.close().

        If Redis is unreachable, the outputs are dropped.  Clients lose no token, because another engine computes them
        again."""
        self._died = died
        self._stopping = True
        self._ring()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the thread has just ended
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join()

    def drain(self, wait_s: float) -> list[Command]:
        if self._failure is not None:
            raise self._failure
        commands: list[Command] = []
        try:
            commands.append(self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait())
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    @property
    def full(self) -> bool:
        return self._put - self._sent >= BUFFER_DELTAS

    def put(self, outputs: Outputs, report: Report) -> None:
        if outputs.deltas or outputs.finished or outputs.returned:
            self._put += sum(map(len, outputs.deltas.values()))
            self._outputs.append((outputs, report.dropped))
        self._report = report
        self._ring()

    def requests_wait(self) -> bool:
        """Return whether requests wait while no serving engine has free capacity.

        False while Redis is unreachable, since this engine could not claim them."""
        try:
            return self._ask(self._bus.hot_prefixes.requests_wait())
        except BusDown:
            return False

    def take_hot_prefixes(self, fingerprint: str) -> list[HotPrefix]:
        """Read and delete the stored hot prefixes of a model.  Raises BusDown."""
        return self._ask(self._bus.hot_prefixes.take(fingerprint))

    def write_hot_prefixes(self, fingerprint: str, prefixes: Sequence[HotPrefix]) -> None:
        """Schedule writing the hot prefixes of a model after the next sync.  Never blocks."""
        self._hot = fingerprint, prefixes
        self._ring()

    def publish_prefixes(self) -> None:
        """Publish the digests that put_prefixes() gets from now on, so that engines can claim by prefix."""
        self._prefixes = deque()

    def put_prefixes(self, gained: list[bytes], lost: list[bytes]) -> None:
        """Publish changes of the prefix cache with the next sync; see PrefixSink."""
        if self._prefixes is not None:
            self._prefixes.append((gained, lost))

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the bus thread and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended; the next drain() raises its error
            self._loop.call_soon_threadsafe(self._wake.set)

    # -- called by the bus thread

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
        config, bus = self._config, engine_side(self._config)
        await bus.open()
        self._bus = bus
        self._opened.put(None)
        wakeups = asyncio.create_task(self._listen(bus))
        watched = asyncio.create_task(self.pool.run(bus.pool_states))
        writing = asyncio.create_task(self._write_hot(bus))  # concurrent with the syncs, so that it delays none
        try:
            while not (self._stopping and not self._outputs):
                usual = min(config.lease_ms, STALE_MS) / 3000
                await self._wait(usual if self._retry_s is None else min(usual, self._retry_s))
                if self._report is not None:
                    await self._sync(bus, self._report)
                    if self._hot and writing.done():
                        writing = asyncio.create_task(self._write_hot(bus))
                    if self._report.load.draining:
                        self.relieved = await self._another_engine(bus, self._report.load.fingerprint)
            await writing
            await self._write_hot(bus)
        finally:
            wakeups.cancel()
            watched.cancel()
            writing.cancel()
            await bus.close(died=self._died or not self._stopping)  # a failure of this thread is a death of the engine

    async def _write_hot(self, bus: EngineSide) -> None:
        if self._hot is None:
            return
        (fingerprint, prefixes), self._hot = self._hot, None
        try:
            await bus.hot_prefixes.write(fingerprint, prefixes)
        except Exception as error:  # not fatal: the next write follows in seconds
            log.warning("could not store %d hot prefixes: %s", len(prefixes), error)

    async def _another_engine(self, bus: EngineSide, fingerprint: str) -> bool:
        """Return whether another engine of the same model accepts requests."""
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
                await bus.wait_for_wakeup()
            except Exception:  # syncs continue at their interval without wake-ups, and log errors of Redis
                log.exception("lost the connection of the wake-up channel, trying again in %g s", WAKEUP_PAUSE_S)
                await asyncio.sleep(WAKEUP_PAUSE_S)
            self._wake.set()

    async def _sync(self, bus: EngineSide, report: Report) -> None:
        """Run one sync: send the outputs, claim requests that fit, and pass the reply to the loop."""
        deltas, finished, returned, count = self._gather()
        load, free_tokens, free_requests, claim_tokens, by_preemption = self._room(report)
        batches = [(gateway, TokenBatch(self._config.engine_id, group)) for gateway, group in deltas.items()]
        began = time.monotonic()
        prefixes = self._prefix_report(report)
        reply = await bus.sync(
            batches,
            finished,
            load,
            free_tokens,
            free_requests,
            prefixes,
            claim_tokens,
            returned,
            preempt_claim_tokens=by_preemption,
        )
        self._telemetry.synced(time.monotonic() - began, bus.queue_share, len(reply.resumed))
        self._telemetry.claimed(reply.claim(request.id).reason for request in reply.generates)
        self._retry_s = reply.retry_ms / 1000 if reply.retry_ms else None
        self.queued = math.ceil(bus.queue_share)
        self.pool.wanted = bus.watched
        self._telemetry.clock_skew_s = bus.clock.skew_s
        self._sent += count
        self._pass_on(reply, bus)

    def _gather(self) -> tuple[dict[str, list[Delta]], list[str], dict[str, str], int]:
        """Take the outputs of all turns since the last sync.

        Returns (deltas by gateway, finished request ids, returned requests and their error lines, number of deltas)."""
        deltas: dict[str, list[Delta]] = {}
        finished: list[str] = []
        returned: dict[str, str] = {}
        turns, count = len(self._outputs), 0
        for _ in range(turns):
            outputs, dropped = self._outputs.popleft()
            count += sum(map(len, outputs.deltas.values()))
            if self._lost:
                self._lost = {name: number for name, number in self._lost.items() if number > dropped}
                outputs = without(outputs, self._lost)
            finished += outputs.finished
            returned |= outputs.returned
            self._backlog.remove((*outputs.finished, *outputs.returned))
            for gateway, group in outputs.deltas.items():
                deltas.setdefault(gateway, []).extend(group)
                self._backlog.remove(delta.id for delta in group)
        if turns > 1:
            deltas = {gateway: merged(group) for gateway, group in deltas.items()}
        return deltas, finished, returned, count

    def _room(self, report: Report) -> tuple[EngineLoad, int, int, int, int]:
        """Return (load, free prompt tokens, free requests, prompt tokens to claim at once, and at once by preemption).

        These are the report's values, minus the requests claimed after the report was made."""
        while self._claimed and self._claimed[0][0] <= report.accepted:
            self._claimed.popleft()
        taken = sum(tokens for _, tokens in self._claimed)
        load = report.load
        if taken:
            own = {tenant: max(0, tokens - taken) for tenant, tokens in load.preemptible_tokens_of.items()}
            preemptible_tokens = max(0, load.preemptible_tokens - taken)
            load = msgspec.structs.replace(load, preemptible_tokens=preemptible_tokens, preemptible_tokens_of=own)
        if self._died:  # the report was made before the failure
            return msgspec.structs.replace(load, preemptible_tokens=0), 0, 0, 0, 0
        bounds = report.free_tokens, report.claim_tokens, report.preempt_claim_tokens
        free_tokens, claim_tokens, by_preemption = (max(0, bound - taken) for bound in bounds)
        free_requests = max(0, report.free_requests - len(self._claimed))
        return load, free_tokens, free_requests, claim_tokens, by_preemption

    def _prefix_report(self, report: Report) -> PrefixReport | None:
        """Return the changes of the prefix cache since the last sync; None if this engine publishes no prefixes."""
        if self._prefixes is None:
            return None
        added: dict[bytes, None] = {}
        removed: dict[bytes, None] = {}
        while self._prefixes:
            gained, lost = self._prefixes.popleft()
            for some, into, out_of in ((lost, removed, added), (gained, added, removed)):
                for digest in some:
                    out_of.pop(digest, None)
                    into[digest] = None
        costs = report.costs
        token_us, step_us = 1e6 * costs.token_s, 1e6 * costs.step_s
        return PrefixReport(
            list(added), list(removed), token_us, step_us, self._backlog.tokens, 1e6 * costs.load_s, costs.loads
        )

    def _pass_on(self, reply: SyncReply, bus: EngineSide) -> None:
        """Queue the commands of a reply for the loop."""
        for request_id in reply.reassigned:  # before the claims, which may contain the same request again
            self._losses += 1
            self._lost[request_id] = self._losses
            self._commands.put(Abort(request_id, reassigned=True))
        if reply.reset_prefix_cache:  # before the claims, which must not hit blocks cached before the reset
            self._commands.put(ResetPrefixCache())
        for request in reply.generates:
            request = on_own_clock(request, bus.clock)
            self._claims += 1
            so_far = reply.resumed.get(request.id, [])
            tokens = len(request.token_ids) + sum(len(logged.token_ids) for logged in so_far if logged.finish is None)
            self._claimed.append((self._claims, tokens))
            self._backlog.add(request.id, max(0, tokens - reply.claim(request.id).held_tokens))
            known = [logged.token_ids if logged.finish is None else None for logged in so_far]
            self._commands.put(Resume(request, known) if known else request)
        for abort in reply.aborts:
            self._commands.put(abort)
        self._backlog.remove(reply.reassigned)
