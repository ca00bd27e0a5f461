"""START HERE: the step loop of an engine, aloud: accept, plan, run, commit, publish.

    Redis ==> BusThread ==inbox==> Engine.turn: accept -> plan -> run -> commit ==outbox==> BusThread ==> Redis

The loop never waits for Redis: bus I/O has a thread of its own behind two plain queues.  It never waits for the
executor either while there is something to plan: plan N+1 is issued before result N is in (`Executor.depth`).

While Redis is away generation goes on, up to BUFFER_TOKENS that have not been sent.

Draining (SIGTERM): another engine that could go on takes over what is here, from the tokens it has, at once.  Without
one it is finished here, for at most `grace_s`; what is left then waits in the queue for an engine that starts.
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
from collections.abc import Callable, Container, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from engine.config import EngineConfig
from engine.core.blocks import AccountingError, BlockPool, DoubleFree, HostPool, Leak
from engine.core.limits import Event, Limits, Outputs, Totals
from engine.core.policy.step_cost import StepCostModel
from engine.core.scheduler import Scheduler
from engine.executor.base import Executor, StepError
from engine.hot_prefixes import PrefixUses
from engine.metrics import Telemetry
from engine.recorder import Recorder, Seen
from engine.wire.bus import BusDown, EngineSide
from engine.wire.clock import RedisClock, steady_ms
from engine.wire.hot_prefix_store import Reuse
from engine.wire.keys import STALE_MS
from engine.wire.messages import Abort, Delta, EngineLoad, Generate, TokenBatch

log = logging.getLogger("quire.engine")
T = TypeVar("T")

IDLE_S = 0.5  # how often an idle loop looks up; new work wakes it at once
FULL_S = 0.05  # the same of one that may not generate more before Redis is back
BUFFER_TOKENS = 2**18  # tokens waiting for Redis, all requests together: some 70 MB
ALARM_S = 10.0  # an alarm is logged so often at most: samples find the same again and again
AUDIT_SHARE = 0.005  # of the loop's time, for looking at samples of the books
LAST_WORDS_S = 5.0  # an engine that goes waits so long for a Redis that is away
BELL_PAUSE_S = 1.0  # after an error on it, before the bell is listened to again


class ConfigError(Exception):
    """The configuration and the loaded model don't fit together; one line."""


def build_scheduler(config: EngineConfig, executor: Executor) -> Scheduler:
    """The core, sized for a loaded model.  Raises ConfigError."""
    max_seqs, step_tokens = config.max_seqs or executor.max_seqs, config.step_tokens or executor.step_tokens
    if step_tokens <= max_seqs:
        raise ConfigError(
            f"step_tokens is {step_tokens}; it must exceed max_seqs, {max_seqs}, or no prompt could start"
        )
    info = executor.info
    limits = Limits(
        max_seqs=max_seqs,
        step_tokens=step_tokens,
        chunk_tokens=config.chunk_tokens or step_tokens,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        admit_threshold=config.admit_threshold,
        eos_ids=frozenset(info.eos_ids),
        fingerprint=info.fingerprint,
        admission=config.admission,
        preempt=config.preempt,
        block_bytes=info.kv_bytes_per_token * config.block_size,
        itl_stretch=config.itl_stretch,
        step_target_s=config.step_target_s,
        allocation=config.allocation,
    )
    pool = BlockPool(
        executor.blocks,
        config.block_size,
        caching=config.prefix_cache and config.allocation == "paged",
        note_discarded=config.poison_free_blocks,
    )
    return Scheduler(pool, limits, HostPool(executor.host_blocks), StepCostModel(executor.swap_bytes_per_s))


class Resume(msgspec.Struct, frozen=True):
    """A request that an earlier engine began."""

    request: Generate
    outputs: list[list[int] | None]  # of each continuation so far; None: it is over


class Audit(msgspec.Struct, frozen=True):
    """Audit the books, all of them, and report what was found under this name."""

    name: str


Order = Generate | Resume | Abort


class Inbox(Protocol):
    """Where orders come from."""

    relieved: bool  # another engine would go on with all that is here

    def drain(self, wait_s: float) -> Sequence[Order | Audit]:
        """Everything that has arrived; waits up to `wait_s` seconds for the first."""


class Outbox(Protocol):
    """Where tokens go."""

    @property
    def full(self) -> bool:
        """No more of them for now."""

    def put(self, outputs: Outputs, report: Report) -> None:
        """Hand over what a turn said.  Never blocks."""


class Report(msgspec.Struct, frozen=True):
    """How the engine stands after a turn."""

    load: EngineLoad
    room_tokens: int  # prompt tokens it could start
    room_requests: int
    accepted: int  # requests taken from the inbox since start
    dropped: int = 0  # requests dropped since start because they are somebody else's now
    audited: tuple[tuple[str, str], ...] = ()  # audits that were ordered, by name: what was found, or ''
    reused: tuple[Reuse, ...] = ()  # prefixes found in the cache, every few seconds


class Engine:
    """Turns orders into tokens, one step at a time."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        telemetry: Telemetry | None = None,
        *,
        flight: Recorder | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """`telemetry`: None for figures that nobody asks for; `flight` records every turn; `clock` is the unix time in
        ms, for a replay; deadlines are on the same clock."""
        self.config = config
        self.executor = executor
        self.core = build_scheduler(config, executor)
        self.core.auditor.sample()  # so that from its first report on everybody knows that audits may be ordered of it
        self.telemetry = telemetry or Telemetry(config.engine_id)
        info = executor.info
        self.telemetry.serving(
            info.name,
            fingerprint=info.fingerprint[:16],
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            block_size=str(config.block_size),
            max_model_len=str(info.max_model_len),
        )
        self.draining = False  # set from outside: claim nothing more, and leave when that costs nobody a token
        self._leave_at = math.inf  # monotonic seconds at which it leaves in any case
        self._inbox = inbox
        self._outbox = outbox
        self.busy_since = 0.0  # monotonic seconds at which the present step began; 0: none computes
        self._in_flight = 0
        self._accepted = self._dropped = 0
        self._idle = self._audited = False
        self._audit_at = 0.0  # monotonic seconds from which the next sample is due
        self._alarm_at = 0.0  # and from which the next alarm is logged
        self._findings: tuple[tuple[str, str], ...] = ()  # of ordered audits, for the next report
        self._behind_since = (
            0.0  # monotonic seconds since what an earlier engine began is computed again; 0: nothing is
        )
        self._tokens_rate, self._blocks_rate = Rate(), Rate()
        self._pace = Pace()
        self._noted = PrefixUses(config.block_size)
        self._flight = flight
        self._clock = clock or steady_ms
        self._prompts: deque[int] = deque()  # prompt tokens of each step in flight

    def run(self) -> None:
        """Until drained.  What is still here then has to be given back by whoever owns the inbox."""
        while not (self.draining and self._may_leave()):
            more = self._idle and self.executor.catch_up()
            self.turn(0.0 if more else IDLE_S if self._idle else FULL_S if self._outbox.full else 0.0)

    def _may_leave(self) -> bool:
        now = time.monotonic()
        self._leave_at = min(self._leave_at, now + self.config.grace_s)
        return self.core.idle or self._inbox.relieved or now >= self._leave_at

    @contextlib.contextmanager
    def aside(self, on_delta: Callable[[Delta], None]) -> Iterator[LocalBox]:
        """Turns within this are nobody's: orders are taken from the box it yields, tokens go to `on_delta`, the world
        hears nothing and no figure counts it.  Only while the engine is idle, and it must be idle again at the end."""
        kept = self._inbox, self._outbox, self.telemetry, self._noted, self._accepted, self.core.totals
        box = LocalBox(on_delta)
        self._inbox = self._outbox = box
        self.telemetry, self._noted = Telemetry(), PrefixUses(self.config.block_size)
        self.core.totals = Totals()
        try:
            yield box
        finally:
            self._inbox, self._outbox, self.telemetry, self._noted, self._accepted, self.core.totals = kept
            self._tokens_rate, self._blocks_rate, self._pace = Rate(), Rate(), Pace()

    def turn(self, wait_s: float = 0.0) -> None:
        """One step.  `wait_s`: how long to wait for the first order."""
        arrived = self._inbox.drain(wait_s)
        orders = [order for order in arrived if not isinstance(order, Audit)]
        if names := [order.name for order in arrived if isinstance(order, Audit)]:
            self._audit(whole=True, names=names)
        clock, telemetry = time.monotonic, self.telemetry
        marks = [clock()]
        for order in orders:
            if isinstance(order, Generate):
                telemetry.accept(order, marks[0], steady_ms())
                self.core.accept(order)
                self._accepted += 1
            elif isinstance(order, Resume):
                telemetry.accept(order.request, marks[0], steady_ms())
                self.core.accept(order.request, order.outputs)
                self._accepted += 1
                self._behind_since = self._behind_since or marks[0]
            elif order.lost:
                self.core.drop(order.id)
                self._dropped += 1
            else:
                self.core.abort(order.id, order.index)
        marks.append(clock())
        now_ms, stalled, failed, result = self._clock(), self._outbox.full, False, None
        prompt_tokens, took_s = 0, 0.0
        self.busy_since = marks[-1]
        try:
            plan = None if stalled else self.core.plan(now_ms)
            marks.append(clock())
            if plan is not None:
                telemetry.planned(plan, self.core.running)
                self.executor.submit(plan)
                self._in_flight += 1
                self._prompts.append(sum(len(piece.token_ids) for piece in plan.slices))
            if self._in_flight and (plan is None or self._in_flight == self.executor.depth):
                self._in_flight -= 1
                result, prompt_tokens = self.executor.collect(), self._prompts.popleft()
        except StepError as error:
            self._in_flight, failed = 0, True
            self._prompts.clear()
            self._step_failed(error)
        self.busy_since = 0.0
        marks.append(clock())
        if result is not None:
            self.core.commit(result)
            took_s = self._pace.step(marks[-1])
            telemetry.collected(result, marks[-1])
        marks.append(clock())
        events = self._publish()
        marks.append(clock())
        telemetry.turn(marks, self.core.idle)
        self._watch_resumption(marks[-1])
        if self._flight and not (self._idle and self.core.idle and not orders):
            held, waiting = self.core.pool.total - self.core.pool.available, len(self.core.waiting)
            self._flight.turn(
                Seen(now_ms, marks[1], orders, stalled, failed, result, prompt_tokens, took_s, held, waiting, events)
            )
        # The whole audit takes tens of milliseconds: only once it seems that nobody is coming, or when it is ordered.
        if self.config.check_books or (self._idle and not orders and not self._audited):
            self._audit(whole=True)
            self._audited = True
        elif marks[-1] >= self._audit_at:
            self._audit(whole=False)
            now = clock()
            self._audit_at = now + (now - marks[-1]) / AUDIT_SHARE
        self._idle = self.core.idle
        self._audited &= self._idle
        if self._idle:
            self._pace.pause()

    def _step_failed(self, error: StepError) -> None:
        """Put all running sequences back.  Clients get a fixed sentence, the log gets the cause."""
        self.telemetry.failed()
        count, guilty = self.core.step_failed()
        ended = f"; request {guilty} ended: it failed twice at the same position" if guilty else ""
        log.error("a step failed, computing %d sequences again%s: %s", count, ended, error)

    def _watch_resumption(self, now: float) -> None:
        """Report how long it took until all that an earlier engine began was computed again."""
        if self._behind_since and not self.core.behind:
            seconds, self._behind_since = now - self._behind_since, 0.0
            self.telemetry.resumed(seconds)
            log.info("resumed all sequences of an earlier engine %.2f s after the first was claimed", seconds)

    def _audit(self, *, whole: bool, names: Sequence[str] = ()) -> None:
        """Audit the books of the blocks, or a sample of them; `names`: who ordered it.  Raises BooksError where the
        engine is configured to stop then, after it has said so to the world."""
        auditor, totals = self.core.auditor, self.core.totals
        found: AccountingError | None = None
        try:
            auditor.whole() if whole else auditor.sample()
        except AccountingError as error:
            found = error
            if isinstance(error, Leak):
                totals.leaks += 1
            elif isinstance(error, DoubleFree):
                totals.double_frees += 1
            else:
                totals.other_alarms += 1
            if (now := time.monotonic()) >= self._alarm_at:
                log.error("the books of the KV blocks don't balance: %s", error)
                self._alarm_at = now + ALARM_S
        self._findings = tuple((name, str(found or "")) for name in names)
        if found is not None and self.config.bad_books == "stop":
            self._publish()
            raise found

    def _publish(self) -> list[Event]:
        core, info, pool = self.core, self.executor.info, self.core.pool
        now, totals, calibration = time.monotonic(), core.totals, core.outlook.calibration
        room_tokens, room_requests = (0, 0) if self.draining else core.room()
        crowd, yield_tokens = ([], 0) if self.draining else core.yielding()
        load = EngineLoad(
            engine=self.config.engine_id,
            model=info.name,
            fingerprint=info.fingerprint,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            block_size=pool.block_size,
            total_blocks=pool.total,
            free_blocks=pool.available,
            cached_blocks=pool.idle,
            running=core.running,
            waiting=len(core.waiting),
            waiting_tokens=core.waiting_tokens,
            time_ms=steady_ms(),
            tokens_per_s=self._tokens_rate.update(totals.generated_tokens, now),
            blocks_per_s=self._blocks_rate.update(totals.released_blocks, now),
            preemptions=totals.preemptions,
            prompt_tokens=totals.prompt_tokens,
            cached_prompt_tokens=totals.cached_prompt_tokens,
            generated_tokens=totals.generated_tokens,
            recomputed_tokens=totals.recomputed_tokens,
            draining=self.draining,
            predicted_peak_blocks=core.predicted_peak(),
            step_s=self._pace.value,
            swapped=core.swapping.sequences,
            swap_preemptions=totals.swap_preemptions,
            swapped_out_bytes=totals.swapped_out_blocks * core.limits.block_bytes,
            swapped_in_bytes=totals.swapped_in_blocks * core.limits.block_bytes,
            paused=core.paused,
            pauses=totals.pauses,
            length_calibration=calibration.table(),
            peaks_judged=calibration.peaks,
            peaks_passed=calibration.peaks_passed,
            peaks_bound_blocks=calibration.bound_blocks,
            peaks_blocks=calibration.peak_blocks,
            audits=totals.audits,
            alarms=totals.leaks + totals.double_frees + totals.other_alarms,
            yields=totals.yields,
            crowd=crowd,
            yield_tokens=yield_tokens,
            eos_ids=info.eos_ids,
        )
        outputs = core.outputs()
        self.telemetry.publish(load, totals, outputs, (core.step, core.committed), now, core.wasted_slots)
        reused: tuple[Reuse, ...] = ()
        if self.config.warm_seconds:
            for event in outputs.events:
                if event.kind == "started":
                    self._noted.note(event)
            reused = self._noted.take(now, at_once=self.draining)
        self._outbox.put(
            outputs, Report(load, room_tokens, room_requests, self._accepted, self._dropped, self._findings, reused)
        )
        self._findings = ()
        return outputs.events


class Rate:
    """Moving average of a growing count, per second; what happened `seconds` ago weighs 1/e of what happens now."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._count = 0
        self._at: float | None = None
        self.value = 0.0

    def update(self, count: int, now: float) -> float:
        """`count` as of `now` (seconds, monotonic)."""
        if self._at is None:
            self._at, self._count = now, count
        elif now > self._at:
            elapsed = now - self._at
            weight = 1 - math.exp(-elapsed / self._seconds)
            self.value += weight * ((count - self._count) / elapsed - self.value)
            self._at, self._count = now, count
        return self.value


class Pace:
    """Seconds from one step to the next: the mean of the first ones, then a moving average.  Idle time is left out."""

    STEPS = 32  # what happened so many steps ago weighs 1/e of what happens now

    def __init__(self) -> None:
        self._last: float | None = None
        self._seen = 0
        self.value = 0.0  # 0: not known

    def step(self, now: float) -> float:
        """A step's results are in, at `now` (seconds, monotonic).  Returns the seconds it took; 0 after a pause."""
        took = 0.0
        if self._last is not None:
            took = now - self._last
            self._seen = min(self._seen + 1, self.STEPS)
            self.value += (took - self.value) / self._seen
        self._last = now
        return took

    def pause(self) -> None:
        """What comes next does not follow the last step."""
        self._last = None


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


def on_own_clock(request: Generate, clock: RedisClock) -> Generate:
    """A claimed request with its times on this process's clock: whatever is done to any clock while it runs here, it
    has the seconds that it had at its claim."""
    queued_ms = clock.local_ms(request.queued_ms) if request.queued_ms else 0
    return msgspec.structs.replace(request, deadline_ms=clock.local_ms(request.deadline_ms), queued_ms=queued_ms)


def without(outputs: Outputs, ids: Container[str]) -> Outputs:
    return Outputs(
        {gateway: [delta for delta in said if delta.id not in ids] for gateway, said in outputs.deltas.items()},
        [request_id for request_id in outputs.finished if request_id not in ids],
    )


def merged(deltas: list[Delta]) -> list[Delta]:
    """One Delta for each continuation: what several steps said, when they go out together."""
    found: dict[tuple[str, int], Delta] = {}
    for delta in deltas:
        key = delta.id, delta.index
        before = found.get(key)
        if before is None:
            found[key] = delta
        else:
            probs = None if before.logprobs is None else before.logprobs + (delta.logprobs or [])
            found[key] = msgspec.structs.replace(
                before,
                token_ids=before.token_ids + delta.token_ids,
                finish=delta.finish,
                logprobs=delta.logprobs if before.logprobs is None else probs,
            )
    return list(found.values())


class LocalBox:
    """Inbox and Outbox in memory, for a caller in the same process."""

    relieved = full = False

    def __init__(self, on_delta: Callable[[Delta], None]) -> None:
        self.orders: list[Order | Audit] = []  # what the caller wants done
        self._on_delta = on_delta

    def drain(self, wait_s: float) -> list[Order | Audit]:
        orders, self.orders = self.orders, []
        return orders

    def put(self, outputs: Outputs, report: Report) -> None:
        for said in outputs.deltas.values():
            for delta in said:
                self._on_delta(delta)
