"""START HERE: the step loop of an engine, aloud: accept, plan, run, commit, publish.

    Redis ==> BusThread ==inbox==> Engine.turn: accept -> plan -> run -> commit ==outbox==> BusThread ==> Redis

The loop never waits for Redis: bus I/O has a thread of its own behind two plain queues.  It never waits for the
executor either while there is something to plan: plan N+1 is issued before result N is in (`Executor.depth`).

While Redis is away generation goes on, up to BUFFER_TOKENS that have not been sent.

Draining (SIGTERM): another engine that could go on takes over what is here, from the tokens it has, at once.  Without
one it is finished here, for at most `grace_s`; what is left then waits in the queue for an engine that starts.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from engine.config import EngineConfig
from engine.core.blocks import AccountingError, BlockPool, DoubleFree, HostPool, Leak
from engine.core.limits import Event, Limits, Totals
from engine.core.policy.step_cost import StepCostModel
from engine.core.scheduler import Scheduler
from engine.executor.base import Executor, StepError
from engine.hot_prefixes import PrefixUses
from engine.load_report import Pace, Rate
from engine.metrics import Telemetry
from engine.orders import Audit, Inbox, LocalBox, Outbox, Report, Resume
from engine.recorder import Recorder, Seen
from engine.wire.clock import steady_ms
from engine.wire.hot_prefix_store import Reuse
from engine.wire.messages import Delta, EngineLoad, Generate

log = logging.getLogger("quire.engine")

IDLE_S = 0.5  # how often an idle loop looks up; new work wakes it at once
FULL_S = 0.05  # the same of one that may not generate more before Redis is back
ALARM_S = 10.0  # an alarm is logged so often at most: samples find the same again and again
AUDIT_SHARE = 0.005  # of the loop's time, for looking at samples of the books


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
