"""Compiles grammars on threads: each distinct grammar once, with fair turns between tenants.

    compile ── cached? ── no ──> waits (fair_list.py) ──thread: compile_grammar──> grammar, for all requests ──> cached
                                   '-- every client has left: dropped

Only the cache is bounded; any number of different schemas may wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from quire.engine.common.fair_list import FairList
from quire.service.grammar.grammar import Compiled, Constraint, compile_grammar

KEPT_BYTES = 32 << 20  # maximum size of the cache: constraints and their grammars
THREADS = 2  # checks at a time; each takes up to some tenths of a second, and the event loop needs a core


@dataclass(slots=True)
class Check:
    """One constraint that waits for its check or is being checked."""

    constraint: Constraint
    outcome: asyncio.Future[Compiled | Exception]
    tenants: Counter[str] = field(default_factory=Counter)  # tenant -> number of requests that wait for this check
    begun: bool = False


class GrammarChecks:
    """Checks constraints on threads, so that a large one delays no stream.  Used from the event loop's thread only."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="grammar")
        self._checks: dict[bytes, Check] = {}
        self._waiting: FairList[bytes] = FairList()
        self._running = 0
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()  # LRU cache, oldest first
        self._kept_bytes, self._max_bytes = 0, kept_bytes

    async def compile(self, constraint: Constraint, tenant: str = "", weight: float = 1.0) -> Compiled:
        """Return the compiled grammar of a constraint, from the cache if possible.  Raises NotServed."""
        key = msgspec.json.encode(constraint)
        if (compiled := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return compiled
        if (check := self._checks.get(key)) is None:
            check = self._checks[key] = Check(constraint, asyncio.get_running_loop().create_future())
        check.tenants[tenant] += 1
        if not check.begun:
            self._waiting.add(tenant, key, weight)
            self._begin()
        try:
            outcome = await asyncio.shield(check.outcome)
        finally:
            self._leave(key, check, tenant)
        if isinstance(outcome, Exception):
            raise outcome.with_traceback(None)
        return outcome

    def _leave(self, key: bytes, check: Check, tenant: str) -> None:
        check.tenants[tenant] -= 1
        if not check.tenants[tenant]:
            del check.tenants[tenant]
            self._waiting.discard(tenant, key)
        if not check.tenants and not check.begun:
            del self._checks[key]

    def _begin(self) -> None:
        """Begin the checks that are next in turn, while a thread is free."""
        loop = asyncio.get_running_loop()
        while self._running < THREADS and (key := self._waiting.pop()) is not None:
            check = self._checks[key]
            check.begun = True
            for tenant in check.tenants:
                self._waiting.discard(tenant, key)
            self._running += 1
            work = loop.run_in_executor(self._pool, compile_grammar, check.constraint)
            work.add_done_callback(lambda done, key=key: self._end(key, done))  # type: ignore[misc]

    def _end(self, key: bytes, done: asyncio.Future[Compiled]) -> None:
        self._running -= 1
        check = self._checks.pop(key)
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            self._keep(key, done.result())
            check.outcome.set_result(done.result())
        elif isinstance(error, Exception):
            check.outcome.set_result(error)
        else:
            check.outcome.cancel()
        self._begin()

    def _keep(self, key: bytes, compiled: Compiled) -> None:
        self._kept[key] = compiled
        self._kept_bytes += len(key) + len(compiled.grammar)
        while self._kept_bytes > self._max_bytes:
            old, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= len(old) + len(dropped.grammar)
