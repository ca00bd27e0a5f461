"""What one turn of the step loop did, as plain values: the only thing that observers of an engine see.

Engine.turn --TurnRecord--> metrics, request log, hot prefixes, accounting checks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from quire.engine.adapters.counts import AdapterCounts
from quire.engine.core.limits import Outputs, Totals
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.executor.grammar_store import GrammarCounts
from quire.engine.observers.canary import CanaryCounts
from quire.engine.orders import Order
from quire.engine.wire.messages import EngineLoad

PHASES = ("accept", "plan", "execute", "commit", "publish")  # phases of a turn, in this order


class TurnRecord(msgspec.Struct, kw_only=True):
    """One turn.  The loop fills it phase by phase; observers must not change it."""

    marks: list[float]  # time.monotonic() when the orders had arrived, then at the end of each of PHASES
    unix_ms: int  # unix time at marks[0], on this process's clock
    was_idle: bool  # no request was here after the turn before
    orders: list[Order]  # as the inbox gave them
    queued: int = 0  # requests that waited in the shared queue, this engine's share of them
    now_ms: int = 0  # unix time the plan was made for
    stalled: bool = False  # no plan was made, because the outbox was full
    plan: StepPlan | None = None  # the step that was submitted
    running: int = 0  # sequences in that step
    result: StepResult | None = None  # result of the step that was collected
    failed: bool = False  # the executor lost every step in flight
    gated: int = 0  # waiting sequences that wait for a grammar or an adapter
    gated_by_adapters: int = 0  # sequences that wait for an adapter
    load: EngineLoad | None = None  # None: the turn has not published yet
    totals: Totals  # counts since start; the scheduler's own object, which keeps changing
    outputs: Outputs = msgspec.field(default_factory=lambda: Outputs({}, []))
    last_step: int = 0  # the last step planned
    last_committed: int = 0
    idle: bool = False  # no request is here after this turn
    draining: bool = False
    resumed_s: float = 0.0  # > 0: seconds until all requests of an earlier engine were computed again, just now
    canary: CanaryCounts = msgspec.field(default_factory=CanaryCounts)  # the canary's own object, like `totals`
    grammar_counts: Callable[[], GrammarCounts] = GrammarCounts
    adapter_counts: Callable[[], AdapterCounts] = AdapterCounts
    # These look at every sequence, so they are not to be called in every turn.
    count_wasted_slots: Callable[[], int]
    measure_sharing: Callable[[], float] = lambda: 0.0  # 1 - KV blocks held / entries of all block tables
    # By group of layers: bytes that sequences hold, and bytes of cached prefixes that none holds.
    group_bytes: Callable[[], tuple[dict[str, int], dict[str, int]]] = lambda: ({}, {})


class Observer(Protocol):
    """Watches an engine.  Runs on the loop's thread after every turn, so it must be quick and must not block."""

    def observe(self, record: TurnRecord) -> None: ...
