"""TurnRecord: plain values that describe one turn of the step loop, the only input of an engine's observers.

Engine.turn --TurnRecord--> metrics, request log, hot prefixes, accounting checks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from quire.engine.adapters.counts import AdapterCounts
from quire.engine.commands import Command
from quire.engine.core.limits import Outputs, Totals
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.executor.grammar_store import GrammarCounts
from quire.engine.observers.canary import CanaryCounts
from quire.engine.wire.messages import EngineLoad

PHASES = ("accept", "plan", "execute", "commit", "publish")  # phases of a turn, in this order


class TurnRecord(msgspec.Struct, kw_only=True):
    """One turn.  The loop fills it phase by phase; observers must not change it."""

    marks: list[float]  # time.monotonic() after the inbox returned, then at the end of each of PHASES
    unix_ms: int  # unix time at marks[0], on this process's clock
    was_idle: bool  # whether the engine had no request after the previous turn
    commands: list[Command]  # the control messages of this turn, as the inbox returned them
    queued: int = 0  # this engine's share of the requests that wait in the shared queue
    now_ms: int = 0  # unix time for which the plan was made
    stalled: bool = False  # no plan was made, because the outbox was full
    plan: StepPlan | None = None  # the step that was submitted
    running: int = 0  # number of sequences in the submitted step
    result: StepResult | None = None  # result of the step that was collected
    failed: bool = False  # whether a step failed, so that the executor dropped all steps in flight
    gated: int = 0  # sequences that wait for a grammar or an adapter
    gated_by_adapters: int = 0  # sequences that wait for an adapter
    # (running sequences, measured seconds of a decode-only step with that many, seconds per prompt token); 0: unknown
    step_costs: tuple[int, float, float] = (0, 0.0, 0.0)
    load: EngineLoad | None = None  # None: the turn has not published yet
    totals: Totals  # counts since start; not a copy, so the scheduler keeps changing it
    outputs: Outputs = msgspec.field(default_factory=lambda: Outputs({}, []))
    last_step: int = 0  # number of the last planned step
    last_committed: int = 0  # number of the last committed step
    idle: bool = False  # whether the engine has no request after this turn
    draining: bool = False
    resumed_s: float = 0.0  # seconds that recomputing all requests of an earlier engine took; set in its last turn
    canary: CanaryCounts = msgspec.field(default_factory=CanaryCounts)  # counts since start; not a copy either
    grammar_counts: Callable[[], GrammarCounts] = GrammarCounts
    adapter_counts: Callable[[], AdapterCounts] = AdapterCounts
    # The following functions visit every sequence, so do not call them in every turn.
    count_wasted_slots: Callable[[], int]
    measure_sharing: Callable[[], float] = lambda: 0.0  # 1 - held KV blocks / entries of all block tables
    # (bytes of blocks that sequences hold, bytes of cached, unreferenced blocks), each by layer group.
    group_bytes: Callable[[], tuple[dict[str, int], dict[str, int]]] = lambda: ({}, {})


class Observer(Protocol):
    """Watches an engine.  Runs on the loop's thread after every turn, so it must be quick and must not block."""

    def observe(self, record: TurnRecord) -> None: ...
