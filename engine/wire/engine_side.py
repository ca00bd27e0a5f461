"""An engine's side of the bus: one sync per step, the wake-up channel, and what the engine holds.

step's batches, load ---> sync() ---> Redis: token channels, tail and logs, lease, queue
requests, aborts     <---     |
                              +-- refused: the lease lapsed or Redis lost data ---> _rejoin(), then again
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Container, Mapping
from typing import Any

import msgspec
from redis.exceptions import RedisError, ResponseError

from quire.engine.wire import link, token_log, token_messages
from quire.engine.wire.clock import RedisClock
from quire.engine.wire.hot_prefix_store import HotPrefixStore
from quire.engine.wire.link import BusDown, Link
from quire.engine.wire.messages import Abort, Delta, EngineLoad, Generate, TokenBatch
from quire.engine.wire.pool_state_store import PoolStateStore
from quire.engine.wire.prefixes import PrefixReport, PublishedPrefixes
from quire.engine.wire.records import ANY_TOKENS, Claim, SyncReply
from quire.engine.wire.scripts import CLOSE, OPEN, OTHERS, REJOIN, SYNC

RESET_COMMAND = b"!reset_prefix_cache"  # engines of earlier releases read it as the abort of an unknown request


class EngineSide:
    """One engine's side of the bus.  Call all methods on one asyncio loop, that of the bus thread."""

    def __init__(
        self, url: str, engine: str, *, namespace: str = "quire", lease_ms: int = 5000, late_share: float = 0.1
    ) -> None:
        """Create the engine's side without connecting.  Raises BusDown for a malformed URL.

        `url`: redis://, rediss:// or unix://.  `late_share`: minimum fraction, 0 to 1, of the claimed prompt tokens
        that come from the late lane."""
        self._engine = engine
        self._lease_ms, self._late_share = lease_ms, late_share
        self._link = Link(url, namespace, reply_s=link.REPLY_S, returned=self._renew_subscription)
        self.clock = RedisClock()  # every sync() adds a sample
        self._wakeups = self._link.redis.pubsub()
        self._subscription_stale = False  # the subscription may be at a server that was demoted to a replica
        self._waiting_for_wakeup: asyncio.Timeout | None = None  # timeout of the pending wait on the wake-up channel
        self.hot_prefixes = HotPrefixStore(self._link)
        self.pool_states = PoolStateStore(self._link)
        self._session = uuid.uuid4().hex  # id of this process; an earlier engine of the same name has another
        self._seq = 0  # sequence number of the last sync with Redis
        self.queue_share = 0.0  # waiting requests per engine after the last sync
        self.watched = False  # whether a gateway watched the engines' blocks at the last sync
        self._epoch = "0"  # lease epoch; another epoch in Redis means that the lease lapsed
        self._registered = False
        self._tenants: dict[str, str] = {}  # request id -> tenant, for the requests that this engine believes it holds
        self._journal = token_log.Journal()
        self._prefixes = PublishedPrefixes()
        self._routes: dict[str, list[str]] = {}  # id -> listeners, if other gateways than the request's own listen
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Generate).decode

    async def check(self) -> None:
        """Check that Redis answers, and its versions.  Raises BusDown or VersionMismatch."""
        await self._link.check()

    async def open(self) -> None:
        """Connect, check versions, and requeue the requests that an earlier process of this name held.

        The engine belongs to the fleet from its first sync on.  Raises BusDown.
        """
        await self.check()
        self._epoch = (await self._link.run_script(OPEN, self._engine, self._session)).decode()
        self._registered = True
        await self._link.retry(self._listen, link.PATIENCE_S)

    async def close(self, *, died: bool = False) -> None:
        """Give up the lease; the requests that the engine still holds return to the queue.

        Never raises BusDown: if Redis does not answer, the lease lapses by itself, with the same effect.  `died`: the
        engine failed, so the attempts of each held request grow by one, as after a lapsed lease."""
        if self._registered:
            self._registered = False
            with contextlib.suppress(BusDown):
                await self._link.run_script(CLOSE, self._engine, self._session, int(died))
        await self._wakeups.aclose()  # type: ignore[no-untyped-call]
        await self._link.close()

    # -------------------------------------------------------------------------------------------------- sync
    async def sync(
        self,
        batches: list[tuple[str, TokenBatch]],
        finished: list[str],
        load: EngineLoad,
        free_tokens: int,
        free_requests: int,
        prefixes: PrefixReport | None = None,
        claim_tokens: int = ANY_TOKENS,
        returned: Mapping[str, str] | None = None,
        preempt_claim_tokens: int = ANY_TOKENS,
    ) -> SyncReply:
        """Send tokens, end requests, renew the lease, claim requests and take aborts, in one round trip.

        Publishes each (gateway, batch) to the gateway, appends its tokens to the logs, and charges them to the tenants.
        Claims requests in queue order, the on-time lane first, while their prompts fit `free_tokens` and
        `free_requests`; 0 claims none.  The request that exceeds `claim_tokens` is the last one claimed; cached prompt
        tokens do not count.  `preempt_claim_tokens` bounds claims by preemption in the same way, even if nothing is
        free.  One claim takes at most all waiting requests divided by the engines, rounded up.  A request past its
        deadline is not claimed but ends, and its gateway receives the Finish.
        Retries with backoff while Redis does not answer; never loses or repeats a batch.

        `prefixes`: changes of this engine's prefix cache.  The engine then prefers requests whose prefixes it has
        cached, and leaves other requests for a moment to engines that can compute them sooner.  None: the engine claims
        in queue order, and other engines leave it no request.

        `returned`: claimed requests whose LoRA adapter this engine lacks -> error line.  They return to the queue;
        "Adapters" in KEYS.md says when they end with this error instead.

        If the lease has lapsed, or Redis has lost acknowledged data, the sync drops the requests that this engine does
        not hold any more (see `reassigned`), and sends the tokens that the remaining logs lack again.
        Raises BusDown when a newer process opened the bus under this engine's name, or Redis refuses for good.  Call
        one at a time.  After a cancelled call it is unknown whether the sync ran, and only close() may follow.
        """
        reassigned: list[str] = []
        self._journal.add(batches, finished)
        room, returned = (free_tokens, free_requests, claim_tokens, preempt_claim_tokens), returned or {}
        while (reply := await self._send(batches, finished, load, room, prefixes, returned)) is None:
            prefixes = msgspec.structs.replace(prefixes, added=[], removed=[]) if prefixes is not None else None
            self._prefixes.start_afresh()
            gone = set(await self._rejoin(load))
            reassigned += gone
            batches = [(gateway, _without(batch, gone)) for gateway, batch in batches]
            finished = [request_id for request_id in finished if request_id not in gone]
        self._forget([*finished, *returned])
        works, commands, queued, engines, _, watched, retry_ms, _ = reply
        self.queue_share, self.watched = queued / max(1, engines), bool(watched)
        reset = RESET_COMMAND in commands
        received = SyncReply([], [], reassigned, retry_ms=retry_ms, reset_prefix_cache=reset)
        for payload, listeners, outputs, held_tokens, passed_over in works:
            self._accept(received, payload, listeners.decode(), outputs, Claim(held_tokens, bool(passed_over)))
        for command in commands:
            if command == RESET_COMMAND:
                continue
            request_id, _, what = command.decode().partition(" ")
            if what.startswith(">"):
                self._route(request_id, what[1:])
            else:
                received.aborts.append(Abort(request_id, index=int(what or -1)))
        return received

    def _accept(self, received: SyncReply, payload: bytes, listeners: str, outputs: list[Any], claim: Claim) -> None:
        """Add a claimed request to the reply and to the requests that this engine holds."""
        request = self._decode(payload)
        received.generates.append(request)
        if claim != Claim():
            received.claims[request.id] = claim
        self._prefixes.claimed(request.prefixes, request.adapter)
        self._tenants[request.id] = request.tenant
        if listeners != request.gateway:
            self._route(request.id, listeners)
        so_far = [token_log.read(tokens, finish) for tokens, finish in outputs]  # empty: no engine has held it before
        self._journal.hold(request.id, [len(output.token_ids) for output in so_far] or [0] * request.n)
        if any(output.token_ids or output.finish for output in so_far):
            received.resumed[request.id] = so_far

    async def _send(
        self,
        batches: list[tuple[str, TokenBatch]],
        finished: list[str],
        load: EngineLoad,
        room: tuple[int, int, int, int],
        prefixes: PrefixReport | None,
        returned: Mapping[str, str],
    ) -> Any:
        """Run one sync under the next sequence number; return Redis' reply, None if Redis refused the sync."""
        self._seq += 1
        produced: dict[str, int] = {}
        for _, batch in batches:
            for delta in batch.deltas:
                if (tenant := self._tenants.get(delta.id)) is not None:
                    searched = delta.finish.searched if delta.finish is not None else 0
                    produced[tenant] = produced.get(tenant, 0) + len(delta.token_ids) + searched
        logged = self._journal.due(batches)
        messages = token_messages.encode(self._routed(batches))
        publishes, added, removed = self._prefixes.update(prefixes)
        costs = prefixes or PrefixReport()
        arguments = self._arguments(
            load, room, costs, logged, finished=finished, returned=returned, produced=produced, publishes=publishes
        )
        sent = self.clock.ticks()
        try:
            reply = await self._link.run_script(
                SYNC,
                self._encode(arguments),
                self._encode(load),
                logged.tokens,
                added,
                removed,
                *(word for extra in logged.extras for word in extra),
                *(word for pair in messages for word in pair),
                patience_s=math.inf,
            )
        except ResponseError as error:
            raise self._superseded(error) from None
        if reply is not None:
            self._journal.entered(logged, sum(len(message) for _, message in messages))
            self._prefixes.sent(vanished=bool(reply[7]))
            self.clock.sample(sent, reply[4])
        return reply

    def _arguments(
        self,
        load: EngineLoad,
        room: tuple[int, int, int, int],
        costs: PrefixReport,
        logged: token_log.Entries,
        **more: Any,
    ) -> dict[str, Any]:
        """Return the named arguments of the sync script; for their meaning see sync.lua."""
        free_tokens, free_requests, claim_tokens, preempt_claim_tokens = room
        return {
            **more,
            "engine": self._engine,
            "session": self._session,
            "seq": self._seq,
            "epoch": self._epoch,
            "lease_ms": self._lease_ms,
            "free_tokens": free_tokens,
            "free_requests": free_requests,
            "claim_tokens": claim_tokens,
            "preempt_claim_tokens": preempt_claim_tokens,
            "preemptible_tokens": load.preemptible_tokens,
            "late_share": self._late_share,
            "token_us": costs.token_us,
            "step_us": costs.step_us,
            "backlog": costs.backlog,
            "load_us": costs.load_us,
            "loads": costs.loads,
            "segments": logged.segments,
            "flushes_tail": logged.flushes_tail,
            "keeps_tail": not logged.whole,
            "extras": len(logged.extras),
        }

    async def _rejoin(self, load: EngineLoad) -> list[str]:
        """Run REJOIN: read which requests this engine still holds and how many of their tokens the logs have.

        Returns the ids of the requests that it does not hold any more."""
        reassigned: list[str] = []
        while True:
            try:
                epoch, held = await self._link.run_script(
                    REJOIN,
                    self._engine,
                    self._session,
                    self._seq,
                    self._lease_ms,
                    self._encode(load),
                    *self._tenants,
                    patience_s=math.inf,
                )
            except ResponseError as error:
                raise self._superseded(error) from None
            self._epoch = epoch.decode()
            known: set[str] = set()
            for request_id, listeners, lengths in held:
                # If a log lacks even tokens from before the claim, this engine cannot restore them.  It omits the
                # request in the next round, so that the request returns to the queue.
                if self._journal.rewind(request_id.decode(), lengths):
                    known.add(request_id.decode())
                    self._route(request_id.decode(), listeners.decode())
            gone = [request_id for request_id in self._tenants if request_id not in known]
            self._forget(gone)
            reassigned += gone
            if len(known) == len(held):
                return reassigned

    def _superseded(self, error: ResponseError) -> Exception:
        if "SUPERSEDED" in str(error):
            return BusDown(f"engine id {self._engine!r} is in use by a newer process")
        return error

    def _forget(self, ids: list[str]) -> None:
        for request_id in ids:
            self._tenants.pop(request_id, None)
            self._routes.pop(request_id, None)
        self._journal.forget(ids)

    def _route(self, request_id: str, listeners: str) -> None:
        if request_id in self._tenants:
            self._routes[request_id] = listeners.split("\n") if listeners else []

    def _routed(self, batches: list[tuple[str, TokenBatch]]) -> list[tuple[str, TokenBatch]]:
        """Regroup the Deltas by the gateways that listen to them now; "": no gateway listens."""
        if not self._routes:
            return batches
        deltas: dict[str, list[Delta]] = {}
        for gateway, batch in batches:
            for delta in batch.deltas:
                for listener in self._routes.get(delta.id, (gateway,)) or ("",):
                    deltas.setdefault(listener, []).append(delta)
        _, some = batches[0] if batches else ("", None)
        return [(gateway, msgspec.structs.replace(some, deltas=own)) for gateway, own in deltas.items()] if some else []

    async def others(self) -> list[EngineLoad]:
        """Return the loads of the other engines with a live lease.  Raises BusDown after PATIENCE_S."""
        loads = await self._link.run_script(OTHERS, self._engine)
        return [msgspec.msgpack.decode(load, type=EngineLoad) for load in loads]

    # -------------------------------------------------------------------------------------------------- wake-ups
    async def wait_for_wakeup(self) -> None:
        """Wait for a wake-up: a request to claim or an abort may be there.  May return without a reason.

        Returns after a reconnect, and after BLOCK_MS at the latest.  A wake-up between two calls is not lost.
        """
        if not self._subscription_stale:
            try:
                async with asyncio.timeout(None) as self._waiting_for_wakeup:
                    await self._wakeups.get_message(timeout=link.BLOCK_MS / 1000)
                    while await self._wakeups.get_message(timeout=0) is not None:
                        pass  # several wake-ups count as one
                return
            except (RedisError, OSError):
                pass
            finally:
                self._waiting_for_wakeup = None
        self._subscription_stale = False
        await self._link.retry(self._listen)

    def _renew_subscription(self) -> None:
        """Subscribe to the wake-up channel again, on a new connection."""
        self._subscription_stale = True
        if self._waiting_for_wakeup is not None:
            link.interrupt(self._waiting_for_wakeup)

    async def _listen(self) -> None:
        # Always subscribe anew: a half-broken subscription may receive only some messages.
        await self._wakeups.aclose()  # type: ignore[no-untyped-call]
        await self._wakeups.subscribe(f"{self._link.prefix}bell", f"{self._link.prefix}bell:{self._engine}")


def _without(batch: TokenBatch, ids: Container[str]) -> TokenBatch:
    """Return a batch without the deltas of these requests."""
    return msgspec.structs.replace(batch, deltas=[delta for delta in batch.deltas if delta.id not in ids])
