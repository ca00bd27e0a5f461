"""Open requests: a mailbox for each continuation, one reader task for all of them, deadlines, and the one way out.

    bus.batches() --> one reader --> mailbox (merged) --> the request's own handler --> text --> socket
                                          ^ a slow client's tokens wait here, at most max_new_tokens of them

Every cancel takes one way, `Streams.withdraw`.  Whoever leaves `Streams.open` early, for whatever reason (client gone,
deadline, error), comes to it through `OpenRequest.__aexit__`; a choice that met its stop string while others go on,
through `OpenRequest.end`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from engine.wire.bus import BusDown, Fleet, GatewaySide, Queue
from engine.wire.messages import Delta, EngineLoad, Finish, Generate, TokenBatch, TokenLogprob
from service.api import Refusal
from service.config import GatewayConfig
from service.telemetry import Telemetry

log = logging.getLogger("quire.gateway")

ATTEMPTS = 4  # to decide and queue before others did; each works on the reading that the one before brought
Admit = Callable[[Fleet], int]  # a reading -> the excess for GatewaySide.submit; raises Refusal


class Mailbox:
    """What one continuation has received and its handler has not taken yet: one merged delta, not a queue of them."""

    __slots__ = (
        "_finish",
        "_logprobs",
        "_tokens",
        "cached_tokens",
        "choice",
        "closed",
        "ended",
        "lost",
        "next",
        "prompt_logprobs",
        "repeated",
        "running",
    )

    def __init__(self, choice: int) -> None:
        self.choice = choice
        self.next = 0  # output position expected next
        self.lost = self.repeated = 0  # tokens that never came, and that came twice
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.ended = False  # the engine (or this gateway, for it) said Finish: no more tokens will come
        self.closed = False  # the handler wants no more
        self.running = True  # an engine may still compute it: it has not said Finish, and was not told to stop
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._finish: Finish | None = None

    def put(self, delta: Delta) -> bool:
        """Merge a delta; False when it brings nothing new (a replay, or after the end).

        A gap can only mean that tokens were lost on the way, so it ends the continuation with an error."""
        if self.ended or self.closed:
            return False
        seen = self.next - delta.first
        if seen < 0:
            self.lost -= seen
            self.fail(Finish("error", message="tokens were lost on the way from the engine"))
            return True
        tokens, logprobs = delta.token_ids, delta.logprobs
        if seen:  # replayed after a crash or a reconnect
            tokens = tokens[seen:]
            logprobs = logprobs[seen:] if logprobs is not None else None
            self.repeated += len(delta.token_ids) - len(tokens)
        if not tokens and delta.finish is None:
            return False
        self.next += len(tokens)
        if self._tokens:
            self._tokens += tokens
        else:
            self._tokens = tokens
        if logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs]
        if delta.first == 0:
            self.cached_tokens, self.prompt_logprobs = delta.cached_tokens, delta.prompt_logprobs
        if delta.finish is not None:
            self._finish, self.ended, self.running = delta.finish, True, False
        return True

    def fail(self, finish: Finish) -> None:
        """End this continuation from here; tokens received so far stay."""
        self._finish, self.ended = finish, True

    def take(self) -> tuple[list[int], list[TokenLogprob] | None, Finish | None]:
        """All new tokens, their logprobs if asked for, and the Finish once there is one; empties the mailbox."""
        taken = (self._tokens, self._logprobs, self._finish)
        self._tokens, self._logprobs = [], None
        return taken


class OpenRequest:
    """One client's request while it is being answered.  Iterate for the mailboxes that changed since the last turn;
    an empty list means that nothing came for `heartbeat_s`.  The iteration ends when every choice was `end`ed."""

    def __init__(
        self, streams: Streams, orders: list[Generate], deadline: float, admit: Admit, heartbeat_s: float
    ) -> None:
        """`deadline` in the event loop's time."""
        self._streams, self._orders, self._admit = streams, orders, admit
        self._loop = asyncio.get_running_loop()
        self._deadline, self._heartbeat_s = deadline, heartbeat_s
        self._continuations = orders[0].n
        self.mailboxes = [Mailbox(choice) for choice in range(len(orders) * self._continuations)]
        self._unfinished = len(self.mailboxes)
        self._changed: list[Mailbox] = []
        self._wake: asyncio.Future[None] | None = None
        self._last_news = self._loop.time()

    async def __aenter__(self) -> OpenRequest:
        """Queue the orders.  Raises Refusal when there is no room or Redis does not take them; then none is queued."""
        self._streams.register(self, self._orders)
        try:
            await self._streams.submit(self._orders, self._admit)
        except Refusal:
            self._streams.forget(self._orders)
            raise
        except BaseException:  # cancelled: nobody knows whether they are queued
            self._leave()
            raise
        self._timers = [
            self._loop.call_at(self._deadline, self.end_all, Finish("deadline")),
            self._loop.call_later(self._heartbeat_s, self._beat),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer in self._timers:
            timer.cancel()
        self._leave()

    def _leave(self) -> None:
        self._streams.forget(self._orders)
        self._streams.record(self.mailboxes)
        for prompt, order in enumerate(self._orders):
            if any(mailbox.running for mailbox in self._mailboxes_of(prompt)):
                self._streams.withdraw(order.id)

    def _mailboxes_of(self, prompt: int) -> list[Mailbox]:
        return self.mailboxes[prompt * self._continuations : (prompt + 1) * self._continuations]

    def __aiter__(self) -> OpenRequest:
        return self

    async def __anext__(self) -> list[Mailbox]:
        if not self._unfinished:
            raise StopAsyncIteration
        if not self._changed:
            self._wake = self._loop.create_future()
            await self._wake
            self._wake = None
        changed, self._changed = self._changed, []
        return changed

    def put(self, prompt: int, delta: Delta) -> None:
        """From the reader task: file a delta and wake the handler."""
        index = prompt * self._continuations + delta.index
        if not 0 <= delta.index < self._continuations:
            log.error("delta for continuation %d of %d ignored", delta.index, self._continuations)
            return
        mailbox = self.mailboxes[index]
        if mailbox.put(delta):
            self._notify(mailbox)

    def _notify(self, mailbox: Mailbox) -> None:
        self._last_news = self._loop.time()
        if mailbox not in self._changed:
            self._changed.append(mailbox)
        self._nudge()

    def _nudge(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def end(self, choice: int) -> None:
        """The handler has all it wants of this choice.  An engine that still computes it is told to stop."""
        mailbox = self.mailboxes[choice]
        if mailbox.closed:
            return
        mailbox.closed = True
        self._unfinished -= 1
        if mailbox.running:
            mailbox.running = False
            prompt, index = divmod(choice, self._continuations)
            others = any(mailbox.running for mailbox in self._mailboxes_of(prompt))
            self._streams.withdraw(self._orders[prompt].id, index if others else -1)

    def end_all(self, finish: Finish) -> None:
        """End every continuation that still runs: its deadline passed, or this gateway must go."""
        for mailbox in self.mailboxes:
            if not (mailbox.ended or mailbox.closed):
                mailbox.fail(finish)
                self._notify(mailbox)

    def _beat(self) -> None:
        """One timer a request, re-armed lazily, so that a heartbeat costs tokens nothing."""
        silent = self._loop.time() - self._last_news
        if silent >= self._heartbeat_s:
            self._last_news = self._loop.time()
            silent = 0.0
            self._nudge()
        self._timers[1] = self._loop.call_later(self._heartbeat_s - silent, self._beat)


class Streams:
    """Every open request of this gateway, and its view of the engines."""

    def __init__(self, bus: GatewaySide, config: GatewayConfig, telemetry: Telemetry) -> None:
        self._bus, self._config, self._telemetry = bus, config, telemetry
        self._open: dict[str, tuple[OpenRequest, int]] = {}  # order id -> its request, and which of its prompts
        self._tasks: list[asyncio.Task[None]] = []
        self._cancels: set[asyncio.Task[None]] = set()
        # Readings are stamped with this process's clock when they change: engines' clocks need not agree with it.
        self._loads: dict[str, tuple[int, EngineLoad]] = {}  # engine -> its own time_ms, load with ours
        self._queue = Queue(accepted=False, queued=0, queued_tokens=0, room_tokens=0, tenants={})
        self._oldest_ms = self._quarantined = 0  # as of the last look at the fleet
        self._read_ms = 0  # when it was read, on this process's clock
        self.trouble: str | None = "the engines have not been looked up yet"  # why the bus cannot be used, one line

    # -- life

    async def start(self) -> None:
        """Read the fleet once, then keep reading it and the tokens."""
        await self._refresh()
        self._tasks = [asyncio.create_task(self._read(), name="read"), asyncio.create_task(self._watch(), name="watch")]

    async def stop(self) -> None:
        """Stop reading; give the last cancels a moment to leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._cancels, return_exceptions=True)  # each bounded by the bus' own patience

    def __len__(self) -> int:
        """Open requests, one for each prompt."""
        return len(self._open)

    def end_all(self, finish: Finish) -> None:
        for request, _ in list(self._open.values()):
            request.end_all(finish)

    # -- requests

    def open(self, orders: list[Generate], timeout_s: float, admit: Admit) -> OpenRequest:
        """An `async with` context in which the orders run; one for each prompt, all with the same `n`.

        `admit` decides on a reading of the fleet, and again on a newer one if the queue has grown past its excess."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        return OpenRequest(self, orders, deadline, admit, self._config.heartbeat_s)

    def register(self, request: OpenRequest, orders: list[Generate]) -> None:
        for prompt, order in enumerate(orders):
            self._open[order.id] = (request, prompt)
        self._telemetry.open_requests.set(len(self._open))

    async def submit(self, orders: list[Generate], admit: Admit) -> None:
        """Queue one client's orders, all or none, if `admit` lets them.  Raises Refusal: its own, or 503."""
        for _ in range(ATTEMPTS):
            excess_tokens = admit(self.fleet)
            began = time.monotonic()
            try:
                queue = await self._bus.submit(*orders, excess_tokens=excess_tokens)
            except BusDown as error:
                self.trouble = str(error)
                raise Refusal(
                    503, "queue_unavailable", "the request queue is not reachable", retry_after_s=2.0
                ) from None
            self._telemetry.record_redis("submit", time.monotonic() - began)
            self._note_queue(queue)
            if queue.accepted:
                return
        raise Refusal(429, "rate_limit_exceeded", "overloaded: the queue fills faster than it is read", retry_after_s=1)

    def forget(self, orders: list[Generate]) -> None:
        for order in orders:
            self._open.pop(order.id, None)
        self._telemetry.open_requests.set(len(self._open))

    def record(self, mailboxes: list[Mailbox]) -> None:
        """They get nothing more."""
        self._telemetry.record_stream(sum(m.lost for m in mailboxes), sum(m.repeated for m in mailboxes))

    def withdraw(self, order_id: str, index: int = -1) -> None:
        """Stop an order, or one of its continuations.  Never waits: the caller may be cancelled."""
        # bus.cancel keeps a withdrawal that does not get through, and sends it along later.
        task = asyncio.create_task(self._bus.cancel(order_id, index), name=f"cancel {order_id}")
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    # -- tokens and the fleet

    async def _read(self) -> None:
        """The only consumer of this gateway's token stream."""
        try:
            async for batch in self._bus.batches():
                self.deliver(batch)
        except Exception:
            log.exception("the token reader failed")
            self.trouble = "the token reader failed"
            self.end_all(Finish("error", message="this gateway lost its token stream"))

    def deliver(self, batch: TokenBatch) -> None:
        """Spread one step's tokens over the mailboxes.  Deltas of closed requests are dropped."""
        opened = self._open
        for delta in batch.deltas:
            if (found := opened.get(delta.id)) is not None:
                found[0].put(found[1], delta)
        if batch.load is not None:
            self._note(batch.load)

    def _note(self, load: EngineLoad) -> None:
        known = self._loads.get(load.engine)
        if known is None or known[0] != load.time_ms:
            ours = msgspec.structs.replace(load, time_ms=int(time.time() * 1000))
            self._loads[load.engine] = (load.time_ms, ours)

    def _note_queue(self, queue: Queue) -> None:
        self._queue, self._read_ms = queue, int(time.time() * 1000)

    async def _refresh(self) -> None:
        began = time.monotonic()
        try:
            fleet = await self._bus.fleet()
        except BusDown as error:
            self.trouble = str(error)
            return
        self._telemetry.record_redis("fleet", time.monotonic() - began)
        for load in fleet.engines:
            self._note(load)
        alive = {load.engine for load in fleet.engines}
        for engine in self._loads.keys() - alive:
            del self._loads[engine]
        self._note_queue(Queue(False, fleet.queued, fleet.queued_tokens, fleet.room_tokens, fleet.tenants))
        self.trouble = None
        self._oldest_ms, self._quarantined = fleet.oldest_ms, fleet.quarantined
        self._telemetry.record_fleet(self.fleet)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.fleet_s)
            await self._refresh()

    @property
    def fleet(self) -> Fleet:
        """The engines with a live lease, `time_ms` on this process's clock, and the queue."""
        loads, queue = [load for _, load in self._loads.values()], self._queue
        return Fleet(
            loads,
            queue.queued,
            queue.queued_tokens,
            self._read_ms,
            queue.room_tokens,
            queue.tenants,
            self._oldest_ms,
            self._quarantined,
        )

    @property
    def fingerprint(self) -> str | None:
        """What answers carry as system_fingerprint: changes when the weights do."""
        return next((f"fp_{load.fingerprint[:16]}" for _, load in self._loads.values()), None)
