"""Gate: delays requests until their resource (grammar, LoRA adapter) is ready, so that no step waits for it.

    Inbox.drain() ==commands==> Gate.drain() ==ready requests==> Engine.turn ==ended requests==> ended
                               |  waiting: by resource, by deadline                             |
                               '-- hold ──> store: prepares resources on threads <── release ───┘

A request holds (references) its resource until it ends, so the resource is still ready when a preempted sequence
resumes.  After an abort or its deadline a waiting request passes the gate, and the scheduler ends it.  If a resource
cannot be prepared, its request ends with an error (`Refused`).  Gates are chained: each gate is the inbox of the next
one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from quire.engine.commands import Command, Inbox, Refused, Resume, request_of
from quire.engine.common.fair_list import FairList
from quire.engine.executor.grammar_store import HeldResources
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import Abort, Generate

POLL_S = 0.002  # seconds between polls of the awaited grammar or adapter while the engine is idle


class Gate:
    """An Inbox that filters the commands (control messages) of another Inbox.  Only the loop's thread may use it."""

    def __init__(self, inbox: Inbox, store: HeldResources | None, clock: Callable[[], int] = steady_ms) -> None:
        """`store`: if None, all commands pass, and the scheduler refuses requests that the executor cannot serve.
        `clock`: unix time in ms for deadlines."""
        self._inbox, self._store, self._clock = inbox, store, clock
        self._waiting: dict[str, list[Command]] = {}  # request id -> its command, then aborts of its choices
        self._by_need: dict[str, dict[str, None]] = {}  # resource -> ids of requests that wait for it, oldest first
        self._deadlines: list[tuple[int, str]] = []  # heap of (deadline_ms, id); ids of gone requests are skipped
        self._queue: FairList[str] = FairList()  # ids of waiting requests that do not hold their resource yet
        self._tenants: dict[str, str] = {}  # id -> tenant, for the ids in `_queue`
        self.waiting_sequences = self.waiting_tokens = 0  # choices of waiting requests, and their prompt tokens

    def need(self, request: Generate) -> str:
        """Return the name that the store has for the resource that a request needs; "" if it needs none."""
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        """Number of requests that wait at this gate."""
        return len(self._waiting)

    @property
    def relieved(self) -> bool:
        """Whether another engine can take over all requests of this engine."""
        return self._inbox.relieved

    @property
    def queued(self) -> int:
        """This engine's share of the requests that wait in the shared queue."""
        return self._inbox.queued

    def drain(self, wait_s: float) -> list[Command]:
        """Return every command that may be applied now; wait up to `wait_s` seconds for the first one.

        Takes O(commands that arrive or pass), for any number of waiting requests."""
        arrived = self._inbox.drain(min(wait_s, POLL_S) if self._waiting else wait_s)
        if self._store is None:
            return list(arrived)
        passed: list[Command] = []
        for text in self._store.finished():
            for request_id in list(self._by_need.get(text, ())):
                passed += self._checked(self._leave(request_id))
        passed += self._expired()
        passed += self._next_holders()
        for command in arrived:
            passed += self._route(command)
        return passed

    def ended(self, request_ids: Iterable[str]) -> None:
        """Release the resources of requests that have ended."""
        if self._store is not None:
            for request_id in request_ids:
                self._store.release(request_id)

    def _route(self, command: Command) -> list[Command]:
        """Process a new command; return the commands that may be applied now."""
        assert self._store is not None
        if isinstance(command, Abort):
            return self._abort(command)
        request = request_of(command)
        if request is None or not (text := self.need(request)):
            return [command]
        if request.id in self._waiting:  # the request was delivered twice
            return []
        if self._full() and not self._store.is_held(text):
            self._queue.add(request.tenant, request.id, request.weight)
            self._tenants[request.id] = request.tenant
        elif self._store.hold(request.id, text, request.tenant, request.weight):
            return self._checked([command])
        else:
            self._by_need.setdefault(text, {})[request.id] = None
        self._waiting[request.id] = [command]
        self._count(request, 1)
        heapq.heappush(self._deadlines, (request.deadline_ms, request.id))
        return []

    def _full(self) -> bool:
        """Return whether the held resources have reached their bound.

        Then further requests wait here without holding their resource; tenants are served round-robin."""
        return False

    def _next_holders(self) -> list[Command]:
        """Add references of waiting requests to their resources while the bound allows it.  Returns the commands that
        may start."""
        assert self._store is not None
        passed: list[Command] = []
        while self._queue and not self._full() and (request_id := self._queue.pop()) is not None:
            del self._tenants[request_id]
            request = request_of(self._waiting[request_id][0])
            assert request is not None
            text = self.need(request)
            done = self._store.hold(request_id, text, request.tenant, request.weight)
            self._by_need.setdefault(text, {})[request_id] = None
            if done:
                passed += self._checked(self._leave(request_id))
        return passed

    def _abort(self, command: Abort) -> list[Command]:
        assert self._store is not None
        if command.id not in self._waiting:
            if command.reassigned:  # the scheduler drops the request without reporting its end
                self._store.release(command.id)
            return [command]
        if command.index >= 0 and not command.reassigned:  # the request's other choices still wait
            self._waiting[command.id].append(command)
            return []
        self._store.release(command.id)
        return [*self._leave(command.id), command]

    def _expired(self) -> list[Command]:
        """Return the requests whose deadline has passed; the scheduler ends them before it starts any request."""
        assert self._store is not None
        passed: list[Command] = []
        while self._deadlines and (self._deadlines[0][1] not in self._waiting or self._is_late()):
            request_id = heapq.heappop(self._deadlines)[1]
            if request_id in self._waiting:
                self._store.release(request_id)
                passed += self._leave(request_id)
        return passed

    def _is_late(self) -> bool:
        return self._deadlines[0][0] <= self._clock()

    def _leave(self, request_id: str) -> list[Command]:
        """Remove a waiting request; return its command and the aborts of its choices."""
        commands = self._waiting.pop(request_id)
        request = request_of(commands[0])
        assert request is not None
        self._count(request, -1)
        if (tenant := self._tenants.pop(request_id, None)) is not None:
            self._queue.discard(tenant, request_id)
            return commands
        same = self._by_need[text := self.need(request)]
        del same[request_id]
        if not same:
            del self._by_need[text]
        return commands

    def _count(self, request: Generate, sign: int) -> None:
        self.waiting_sequences += sign * request.width
        self.waiting_tokens += sign * len(request.token_ids)

    def _checked(self, commands: list[Command]) -> list[Command]:
        """Return the commands of a request whose resource is ready; if the resource failed, a command that ends it."""
        command = commands[0]
        request = request_of(command)
        assert self._store is not None
        assert request is not None
        if not (fault := self._store.fault(self.need(request))):
            return commands
        end = self.end(command, request, fault)
        self._store.release(request.id)
        return [end, *commands[1:]]

    def end(self, command: Command, request: Generate, fault: str) -> Command:
        """Return the command that ends a request whose resource could not be prepared.  `fault`: the error line."""
        return Refused(request, command.outputs if isinstance(command, Resume) else None, fault)
