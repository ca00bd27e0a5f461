"""START HERE: the step loop of an engine: accept, plan, run, commit, publish.

    Redis => BusThread =inbox=> Engine.turn: accept -> plan -> run -> commit -> publish =outbox=> BusThread => Redis
                                     |
                                     +--TurnRecord--> observers: metrics, request log, ...

The loop never waits for Redis: the bus thread does the I/O with Redis, behind an inbox and an outbox.  The loop waits
for the executor only if there is nothing to plan: it submits plan N+1 before it collects result N (`Executor.depth`).

While Redis is unreachable, generation continues until the outbox is full (`bus_thread.BUFFER_DELTAS`).

A draining engine (SIGTERM) returns its requests to the queue, and another engine of the same model continues them from
the tokens sent so far.  If there is no such engine, this engine finishes them, for at most `grace_s`; the rest returns
to the queue.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from copy import copy

from quire.engine.adapter_gate import AdapterGate
from quire.engine.commands import Inbox, Outbox, Report, Resume, Returned, StepCosts, request_of
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.limits import Limits
from quire.engine.core.policy.allocation import shares_blocks
from quire.engine.core.policy.step_cost import StepCostModel
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.state_pool import StatePool
from quire.engine.executor.base import Executor, StepError
from quire.engine.grammar_gate import GrammarGate
from quire.engine.intake import Intake
from quire.engine.observers.accounting_checks import AccountingChecks
from quire.engine.observers.canary import Canary
from quire.engine.observers.load_report import LoadReport
from quire.engine.observers.turn_record import Observer, TurnRecord
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import Abort

log = logging.getLogger("quire.engine")

IDLE_S = 0.5  # maximum wait of an idle engine for commands (control messages); a command ends the wait at once
FULL_S = 0.05  # maximum wait for commands while the outbox is full


class ConfigError(OperatorError):
    """The configuration does not fit the loaded model; the text is one line."""

    exit_status = 2


def build_scheduler(config: EngineConfig, executor: Executor) -> Scheduler:
    """Return a scheduler sized for a loaded model.  Raises ConfigError."""
    max_seqs, step_tokens = config.max_seqs or executor.max_seqs, config.step_tokens or executor.step_tokens
    if step_tokens <= max_seqs:
        raise ConfigError(
            f"step_tokens is {step_tokens}; it must exceed max_seqs, {max_seqs}, or no prompt could start"
        )
    info = executor.info
    if info.state_bytes and config.preempt == "swap":
        raise ConfigError("preempt is swap; with recurrent state it must be recompute, or auto, which recomputes")
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
        preempt="recompute" if info.state_bytes else config.preempt,
        block_bytes=info.kv_bytes_per_token * config.block_size,
        itl_stretch=config.itl_stretch,
        step_target_s=config.step_target_s,
        grammars=info.grammars,
        beams=info.beams and shares_blocks(config.admission),
        adapter_slots=config.lora_slots if info.adapters else 0,
        tile_tokens=info.tile_tokens,
        recurrent=info.state_bytes > 0,
    )
    pool = BlockPool(
        executor.blocks,
        config.block_size,
        caching=config.prefix_cache,
        note_discarded=config.poison_free_blocks,
    )
    costs = StepCostModel(executor.swap_bytes_per_s)
    states = StatePool(info.checkpoints) if info.state_bytes else None
    core = Scheduler(pool, limits, HostPool(executor.host_blocks), costs, states, info.windows)
    core.drafts.drafter = executor.drafter
    core.drafts.run_ahead = executor.depth > 1 and executor.drafter is not None
    core.drafts.max_drafts = info.draft_tokens
    return core


class Engine:
    """Turns commands (control messages) into tokens, one step at a time."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        *,
        observers: Iterable[Observer] = (),
        core: Scheduler | None = None,
        clock: Callable[[], int] = steady_ms,
    ) -> None:
        """`observers` get the record of every turn.  `core`: a scheduler made by build_scheduler(); None: build one.
        `clock`: unix time in ms for deadlines.  Raises ConfigError."""
        self.config = config
        self.executor = executor
        self.core = core or build_scheduler(config, executor)
        self.observers = list(observers)
        self.checks = AccountingChecks(self.core, config)
        self.canary = Canary(config, self.core, executor)
        self.draining = False  # set by another thread: claim no request, and end run() when no token would be lost
        self.busy_since = 0.0  # monotonic seconds at which the current step began; 0: no step is running
        self._leave_at = math.inf  # monotonic seconds at which a draining engine ends run() in any case
        held_mib = config.grammars_held_mib
        self._adapters = AdapterGate(inbox, executor.adapter_store, clock, returns=outbox.returns)
        self._inbox = GrammarGate(self._adapters, executor.grammar_store, clock, max_held_mib=held_mib)
        self._outbox = outbox
        self._intake = Intake(self.core)
        self._clock = clock
        self._load = LoadReport(config.engine_id, executor.info)
        self._in_flight = 0  # steps submitted and not collected
        self._accepted = self._dropped = 0  # number of requests since start
        self._idle = False  # whether no request was left after the last turn
        self._behind_since = 0.0  # monotonic seconds since which resumed requests are being recomputed; 0: none is

    def run(self) -> None:
        """Run turns until drained.  The caller must then return the remaining requests to the queue."""
        draining = False
        while not (draining and self._may_leave()):
            draining = self.draining  # read before the turn, so that at least one turn reports it
            at_once = self._idle and (draining or self.checks.awaited or self.executor.catch_up())
            self._run_canary(idle=self._idle and not at_once)
            self.turn(0.0 if at_once else IDLE_S if self._idle else FULL_S if self._outbox.full else 0.0)

    def turn(self, wait_s: float = 0.0) -> None:
        """Run one step.  `wait_s`: how long to wait for the first command."""
        record = self._accept(wait_s)
        self._plan(record)
        self._run(record)
        self._commit(record)
        self._refill(record)
        self._publish(record)
        self._observe(record)

    def _accept(self, wait_s: float) -> TurnRecord:
        """Pass new commands to the scheduler, as many as one turn takes."""
        arrived = self._inbox.drain(0.0 if self._intake else wait_s)
        self.core.claims.queued = self._inbox.queued
        now = time.monotonic()
        commands = self._intake.apply(arrived)
        for command in commands:
            if request_of(command) is not None:
                self._accepted += 1
            elif isinstance(command, Abort) and command.reassigned:
                self._dropped += 1
            if isinstance(command, Resume):
                self._behind_since = self._behind_since or now
        return TurnRecord(
            marks=[now, time.monotonic()],
            unix_ms=steady_ms(),
            was_idle=self._idle,
            commands=commands,
            queued=self.core.claims.queued,
            totals=self.core.report.totals,
            canary=self.canary.counts,
            grammar_counts=self._inbox.counts,
            adapter_counts=self._adapters.counts,
            count_wasted_slots=self.core.occupancy.wasted_positions,
            measure_sharing=self.core.occupancy.shared_fraction,
            group_bytes=self.core.occupancy.group_bytes,
        )

    def _plan(self, record: TurnRecord) -> None:
        """Plan the next step, unless the outbox is full."""
        record.now_ms, record.stalled = self._clock(), self._outbox.full
        self.busy_since = record.marks[-1]
        if not record.stalled:
            record.plan = self.core.plan(record.now_ms)
            record.running = self.core.running
        record.marks.append(time.monotonic())

    def _run(self, record: TurnRecord) -> None:
        """Submit the plan; collect the oldest step in flight if there is no plan or `Executor.depth` is reached."""
        try:
            if record.plan is not None:
                self.executor.submit(record.plan)
                self._in_flight += 1
            if self._in_flight and (record.plan is None or self._in_flight == self.executor.depth):
                self._in_flight -= 1
                record.result = self.executor.collect()
        except StepError as error:
            self._in_flight, record.failed = 0, True
            count, guilty = self.core.step_failed()
            ended = f"; request {guilty} ended: it failed twice at the same position" if guilty else ""
            # Only the log has the cause; clients get a fixed error message.
            log.error("a step failed, recomputing %d sequences%s: %s", count, ended, error)
        self.busy_since = 0.0
        record.marks.append(time.monotonic())

    def _commit(self, record: TurnRecord) -> None:
        """Append the sampled tokens to their sequences."""
        if record.result is not None:
            self.core.commit(record.result)
            self._load.pace.step(record.marks[-1])
        record.marks.append(time.monotonic())

    def _refill(self, record: TurnRecord) -> None:
        """Submit the next step before the outputs are published, if the device is idle because of drafts.

        A step with drafts is planned only when all results have arrived, so the device waits for this plan."""
        if record.result is None or record.plan is not None or self._in_flight or not self.core.drafts.run_ahead:
            return
        if not self._outbox.full and (plan := self.core.plan(record.now_ms)) is not None:
            record.plan, record.running = plan, self.core.running
            self.executor.submit(plan)
            self._in_flight += 1

    def _publish(self, record: TurnRecord) -> None:
        """Pass the outputs and a report of the engine's state to the outbox."""
        core, now = self.core, time.monotonic()
        record.draining = self.draining
        gates = self._adapters, self._inbox
        free_tokens, free_requests = (0, 0) if record.draining else core.headroom.startable()
        free_requests = min(free_requests, core.limits.max_seqs - self._waiting)  # requests at gates count, too
        claim_tokens = core.headroom.claimable() if free_tokens else 0
        gated = sum(gate.waiting_sequences for gate in gates), sum(gate.waiting_tokens for gate in gates)
        record.gated, record.gated_by_adapters = gated[0], self._adapters.waiting_sequences
        record.load = self._load.describe(core, now, draining=record.draining, queued=record.queued > 0, gated=gated)
        record.outputs = core.outputs()
        self.canary.take(record.outputs)
        record.outputs.returned = {one.request.id: one.why for one in record.commands if isinstance(one, Returned)}
        for gate in gates:
            gate.ended(record.outputs.finished)
        record.last_step, record.last_committed = core.step, core.committed
        record.idle = core.idle and not self._intake
        record.step_costs = core.running, core.step_cost.exact_decode_s(core.running), core.step_cost.token_s
        costs = StepCosts(core.step_cost.token_s, core.step_cost.decode_s(core.running), *self._adapters.loads)
        counts = self._accepted, self._dropped
        by_preemption = core.headroom.claimable_by_preemption() if record.load.preemptible_tokens else 0
        report = Report(record.load, free_tokens, free_requests, *counts, costs, claim_tokens, by_preemption)
        self._outbox.put(record.outputs, report)
        if self._behind_since and not core.requests.behind:
            record.resumed_s, self._behind_since = now - self._behind_since, 0.0
            log.info(
                "recomputed all requests of an earlier engine %.2f s after the first was claimed", record.resumed_s
            )
        self._idle = record.idle
        if self._idle:
            self._load.pace.pause()
        record.marks.append(time.monotonic())

    def _observe(self, record: TurnRecord) -> None:
        """Pass the turn's record to the observers.  Raises AccountingError if `on_accounting_error` is "stop"."""
        for observer in self.observers:
            observer.observe(record)
        self.checks.observe(record)
        if self.checks.fatal:
            # Report the alarm to the gateways before the engine ends.  A copy, since observers may keep the record.
            self._publish(copy(record))
            raise self.checks.fatal

    def _run_canary(self, *, idle: bool) -> None:
        """Run the canary if it is due, between two turns of an idle engine, or as a request of a busy one.

        Raises ExecutorLost."""
        if not self._idle and not self.draining:
            self.canary.join()
        if self.canary.due(idle=idle):
            self.busy_since = time.monotonic()  # the watchdog ends an engine whose device hangs
            self.canary.run()
            self.busy_since = 0.0

    @property
    def _waiting(self) -> int:
        """Number of requests that wait for a grammar or an adapter."""
        return self._inbox.waiting + self._adapters.waiting

    def _may_leave(self) -> bool:
        now = time.monotonic()
        self._leave_at = min(self._leave_at, now + self.config.grace_s)
        answered = self.core.idle and not self._waiting and not self._intake
        return answered or self._inbox.relieved or now >= self._leave_at
