"""Every Redis key, command, script, TTL and retry of Quire: the two ends of the bus, next to each other.

Every key starts with "{namespace}:"; the braces are Redis' hash tag, so that one deployment shares one cluster slot.

    key              type     what                                           written by        goes away
    arrivals         string   number of the last request queued              submit            never
    queue:TENANT     zset     waiting id -> place (see below)                submit, claim..   with its members
    waiting          hash     waiting id -> "TOKENS TENANT"                  as queue:TENANT   with its members
    ages             zset     waiting id -> unix ms of its submit            as queue:TENANT   with its members
    queued_tokens    hash     tenant -> prompt tokens in queue:TENANT        as queue:TENANT   with the queue
    turns            zset     tenant with a queue -> its counter             as queue:TENANT   with the queue
    counters         hash     tenant -> virtual tokens it was served         claim, exchange   never
    weights          hash     tenant -> weight                               submit            never
    left             string   the tenant whose queue emptied last            as queue:TENANT   never
    req:ID           hash     payload (msgpack Generate), tokens, place,     submit, claim     at its end, or EXPIRY
                              since (unix ms of its submit),                                   after its deadline
                              tenant, deadline (unix ms), engine (who
                              claimed it), dropped (indices of the
                              continuations nobody wants any more)           cancel
                     hash     gone=1: ended, and a late retry must not       finish, cancel    TOMBSTONE
                              bring it back
    engines          set      engines that may have a lease                  exchange          lapse, close
    lease:ENGINE     string   msgpack EngineLoad                             exchange          lease_ms
    engine:ENGINE    hash     session, seq and reply of its last exchange,   open, exchange    close, MEMORY
                              room (prompt tokens it would still claim
                              after it), heard (unix ms of it)
    held:ENGINE      zset     claimed id -> place                            claim, finish     finish, lapse, close
    lost:ENGINE      zset     what a lapsed lease took from it               lapse             next exchange, MEMORY
    orders:ENGINE    list     to abort: "ID", or "ID INDEX" for one of its   cancel, claim     next exchange, MEMORY
                              continuations
    out:GATEWAY      stream   b = msgpack TokenBatch, one entry a step       exchange          trimmed when read, and
                                                                                               STREAM after the last
    bell             channel  "there may be something to claim"              submit, lapse..
    bell:ENGINE      channel  "there may be an order for you"                cancel

Order.  Within a tenant a request's place is PLACES * its priority + its arrival number, so what a dead engine held goes
back to exactly where it stood.  Between tenants the one with the smallest counter goes first: the Virtual Token Counter
(VTC) of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.  A counter grows by (prompt tokens, when
they are claimed, + OUTPUT_COST * output tokens, as they are produced) / weight.  A tenant that had nothing waiting is
lifted to the smallest counter of those that have, or to that of the last to leave when nobody has: idleness saves
nothing up.  Whoever is first is served while there is room, so no room stays empty.

Reservations.  What is queued is what is booked: an engine's exchange says how much room it has, less what it claims in
it, and submit queues only while all that is queued stays within all that room plus the excess its caller allows.  Both
happen inside one script, so any number of gateways can't spend the same room twice, and a dead gateway's bookings live
and end with its requests.

All state moves inside Lua scripts, each atomic, and each harmless when it runs twice, because a
reply may be lost after the server has done the work: submit finds the id present, cancel finds it gone, and exchange
carries a sequence number whose last reply the server remembers.

Durability is the server's: with `appendfsync everysec` a server crash loses nothing, a power cut up to a second.
Needs Redis 6.2 or later, or Valkey; nothing here is pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from engine.wire.messages import Abort, EngineLoad, Generate, TokenBatch

log = logging.getLogger("quire.bus")
T = TypeVar("T")

PATIENCE_S = 2.0  # how long a gateway-side call, and open() on both sides, tries before it raises BusDown
REPLY_S = 5.0  # an engine's exchange takes a silent connection for dead after this, and tries on a new one
BACKOFF_S = (0.02, 1.0)  # first and longest pause between two tries; half of each is random
BLOCK_MS = 5_000  # a gateway's longest wait for the next batch, and an engine's for the bell, in one command
CONNECTIONS = 8  # a side's commands in flight at once; more wait their turn
READ_COUNT = 256  # most stream entries in one read
EXPIRY_MS = 60_000  # a request outlives its deadline by this, in case nobody is left to end it
TOMBSTONE_MS = 10_000  # longer than any retry of a submit
STREAM_MS = 600_000  # a stream nobody reads goes away this long after its last entry
MEMORY_MS = 3_600_000  # how long a silent engine is remembered
OUTPUT_COST = 2  # an output token costs a tenant as much as so many prompt tokens (VTC's w_q / w_p)
PLACES = 2**40  # arrivals before a priority class would run into the next; times 2**13 classes a double is exact
PRIORITIES = (-100, 100)  # first and last class; lower goes earlier
STALE_MS = 3_000  # an engine not heard of for so long has no room, though its lease still runs


class BusDown(Exception):
    """Redis cannot be reached or refuses writes; says which and for how long, in one line."""


class Fleet(msgspec.Struct, frozen=True):
    """What a gateway knows about the engines: those with a live lease, and the shared queue."""

    engines: list[EngineLoad]
    queued: int  # requests nobody has claimed yet
    queued_tokens: int  # their prompt tokens, times nothing: siblings share the prompt
    time_ms: int  # unix time of this reading
    room_tokens: int = 0  # prompt tokens the engines would still claim; one silent for STALE_MS has none
    tenants: dict[str, Turn] = {}  # those with something queued
    oldest_ms: int = 0  # since the oldest in the queue was first queued


class Turn(msgspec.Struct, frozen=True):
    """How a tenant with something in the queue stands."""

    queued_tokens: int  # its prompt tokens nobody has claimed yet
    counter: float  # virtual tokens it was served: the smallest goes first
    weight: float


class Queue(msgspec.Struct, frozen=True):
    """The queue right after a submit."""

    accepted: bool  # False: nothing was queued, it would have been too much
    queued: int
    queued_tokens: int
    room_tokens: int
    tenants: dict[str, Turn]


class Claimed(msgspec.Struct, frozen=True):
    """What one exchange brought an engine."""

    generates: list[Generate]
    aborts: list[Abort]  # to be carried out after `generates` are accepted: they may concern each other
    # Requests another engine took over, or a client withdrew, after this engine's lease had lapsed: drop them without a
    # word, no Delta and no `finished`, for they are somebody else's now.  (A late one does no harm: see `first`.)
    lost: list[str] = []


# ---------------------------------------------------------------------------------------------------------- scripts
# KEYS[1] is the prefix; every other key is made from it.  When its memory is full, Redis refuses a script whose first
# write takes memory, and none that began with a delete.  So submit is refused before it did anything, and the others,
# which make room in the end, always run.

_PRELUDE = f"""
local P = KEYS[1]
local call = redis.call

local function charge(tenant, tokens)  -- negative: a refund
  local counter = call('HINCRBYFLOAT', P .. 'counters', tenant, tokens / (call('HGET', P .. 'weights', tenant) or 1))
  call('ZADD', P .. 'turns', 'XX', counter, tenant)
end

local function now_ms()
  local now = call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

local function enqueue(id)
  local tokens, place, tenant, since = unpack(
    call('HMGET', P .. 'req:' .. id, 'tokens', 'place', 'tenant', 'since'))
  if not call('ZSCORE', P .. 'turns', tenant) then
    local counter = tonumber(call('HGET', P .. 'counters', tenant) or 0)
    local floor = call('ZRANGE', P .. 'turns', 0, 0, 'WITHSCORES')[2]
                  or call('HGET', P .. 'counters', call('GET', P .. 'left') or '') or 0
    if counter < tonumber(floor) then
      counter = floor
      call('HSET', P .. 'counters', tenant, floor)
    end
    call('ZADD', P .. 'turns', counter, tenant)
  end
  call('ZADD', P .. 'queue:' .. tenant, place, id)
  call('ZADD', P .. 'ages', since or now_ms(), id)
  call('HSET', P .. 'waiting', id, tokens .. ' ' .. tenant)
  call('HINCRBY', P .. 'queued_tokens', tenant, tokens)
end

local function dequeue(id)  -- says whether it was waiting
  local entry = call('HGET', P .. 'waiting', id)
  if not entry then return false end
  local tokens, tenant = string.match(entry, '^(%d+) (.*)$')
  call('ZREM', P .. 'queue:' .. tenant, id)
  call('HDEL', P .. 'waiting', id)
  call('ZREM', P .. 'ages', id)
  if call('EXISTS', P .. 'queue:' .. tenant) == 1 then
    call('HINCRBY', P .. 'queued_tokens', tenant, -tokens)
  else
    call('HDEL', P .. 'queued_tokens', tenant)
    call('ZREM', P .. 'turns', tenant)
    call('SET', P .. 'left', tenant)
  end
  return true
end

local function alive(id)
  return call('HEXISTS', P .. 'req:' .. id, 'payload') == 1
end

local function bury(id)
  local key = P .. 'req:' .. id
  call('DEL', key)
  call('HSET', key, 'gone', 1)
  call('PEXPIRE', key, {TOMBSTONE_MS})
end

local function tell_expired(id, payload)  -- what an engine would say to its gateway: TokenBatch, Delta, Finish
  local request, deltas = cmsgpack.unpack(payload), {{}}
  for index = 0, (request.n or 1) - 1 do
    deltas[index + 1] = {{id, 0, {{}}, {{'deadline'}}, index}}
  end
  local out = P .. 'out:' .. request.gateway
  call('XADD', out, '*', 'b', cmsgpack.pack({{engine = '', deltas = deltas}}))
  call('PEXPIRE', out, {STREAM_MS})
end

local function head()  -- the id whose turn it is; those whose time ran out leave here
  local now = now_ms()
  while true do
    local tenant = call('ZRANGE', P .. 'turns', 0, 0)[1]
    if not tenant then return nil end
    local id = call('ZRANGE', P .. 'queue:' .. tenant, 0, 0)[1]
    local payload, deadline = unpack(call('HMGET', P .. 'req:' .. id, 'payload', 'deadline'))
    if payload and tonumber(deadline) > now then return id end
    dequeue(id)
    if payload then
      bury(id)
      tell_expired(id, payload)
    end
  end
end

local function room()  -- prompt tokens that the engines would still claim
  local oldest, room = now_ms() - {STALE_MS}, 0
  for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
    local left, heard = unpack(call('HMGET', P .. 'engine:' .. engine, 'room', 'heard'))
    if heard and tonumber(heard) >= oldest and call('EXISTS', P .. 'lease:' .. engine) == 1 then
      room = room + left
    end
  end
  return room
end

local function turns()  -- [tenant, its counter] ..., [tokens] ... and [weight] ... of those with a queue
  local tenants, names = call('ZRANGE', P .. 'turns', 0, -1, 'WITHSCORES'), {{}}
  for i = 1, #tenants, 2 do names[#names + 1] = tenants[i] end
  if #names == 0 then return {{tenants, names, names}} end
  return {{tenants, call('HMGET', P .. 'queued_tokens', unpack(names)), call('HMGET', P .. 'weights', unpack(names))}}
end

local function order_abort(engine, what)  -- "ID" or "ID INDEX"
  local key = P .. 'orders:' .. engine
  call('RPUSH', key, what)
  call('PEXPIRE', key, {MEMORY_MS})
  call('PUBLISH', P .. 'bell:' .. engine, '')
end

local function hold(engine, id)
  local key = P .. 'req:' .. id
  local place, tenant, tokens, dropped = unpack(call('HMGET', key, 'place', 'tenant', 'tokens', 'dropped'))
  call('ZADD', P .. 'held:' .. engine, place, id)
  call('HSET', key, 'engine', engine)
  charge(tenant, tokens)
  for index in string.gmatch(dropped or '', '%d+') do  -- before an earlier engine died
    order_abort(engine, id .. ' ' .. index)
  end
end

local function give_back(engine)  -- all it holds goes back to where it stood; returns those requests
  local ids = {{}}
  local held = call('ZRANGE', P .. 'held:' .. engine, 0, -1)
  call('DEL', P .. 'held:' .. engine, P .. 'lease:' .. engine)
  call('SREM', P .. 'engines', engine)
  for _, id in ipairs(held) do
    if alive(id) then
      local key = P .. 'req:' .. id
      call('HDEL', key, 'engine')
      charge(call('HGET', key, 'tenant'), -call('HGET', key, 'tokens'))
      enqueue(id)
      ids[#ids + 1] = id
    end
  end
  if #ids > 0 then call('PUBLISH', P .. 'bell', '') end
  return ids
end
"""

# tenant, weight, priority, deadline, most tokens queued beyond the room ('' for any number), then (id, payload, prompt
# tokens) ...: all or none of them
_SUBMIT = f"""
local tenant, weight, priority, deadline, excess = unpack(ARGV, 1, 5)
local room = room()
local accepted = call('EXISTS', P .. 'req:' .. ARGV[6]) == 1  -- a retry: only the reply did not arrive
if not accepted then
  local tokens = 0
  for _, queued in ipairs(call('HVALS', P .. 'queued_tokens')) do tokens = tokens + queued end
  for i = 8, #ARGV, 3 do tokens = tokens + ARGV[i] end
  accepted = excess == '' or tokens <= room + excess
  if accepted then
    for i = 6, #ARGV, 3 do
      local id, payload, size = unpack(ARGV, i, i + 2)
      local key = P .. 'req:' .. id
      call('HSET', key, 'payload', payload, 'tokens', size, 'tenant', tenant, 'deadline', deadline,
           'place', priority * {PLACES} + call('INCR', P .. 'arrivals'), 'since', now_ms())
      call('PEXPIREAT', key, deadline + {EXPIRY_MS})
      call('HSET', P .. 'weights', tenant, weight)
      enqueue(id)
    end
    call('PUBLISH', P .. 'bell', '')
  end
end
return {{accepted and 1 or 0, call('HLEN', P .. 'waiting'), room, turns()}}
"""

# (id, index) ...; index -1: every continuation
_CANCEL = """
for i = 1, #ARGV, 2 do
  local id, index = ARGV[i], ARGV[i + 1]
  local key = P .. 'req:' .. id
  local engine, dropped = unpack(call('HMGET', key, 'engine', 'dropped'))
  if index == '-1' then
    bury(id)
    if not dequeue(id) and engine then order_abort(engine, id) end
  elseif alive(id) then
    call('HDEL', key, 'dropped')  -- a first write that memory never refuses
    call('HSET', key, 'dropped', (dropped or '') .. ' ' .. index)
    if engine then order_abort(engine, id .. ' ' .. index) end
  end
end
"""

_FLEET = f"""
for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
  if call('EXISTS', P .. 'lease:' .. engine) == 0 then
    local lost = P .. 'lost:' .. engine
    for order, id in ipairs(give_back(engine)) do call('ZADD', lost, order, id) end
    call('PEXPIRE', lost, {MEMORY_MS})
  end
end
head()
local loads = {{}}
for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
  loads[#loads + 1] = call('GET', P .. 'lease:' .. engine)
end
local oldest = call('ZRANGE', P .. 'ages', 0, 0, 'WITHSCORES')[2]
return {{loads, now_ms(), call('HLEN', P .. 'waiting'), room(), turns(), oldest and now_ms() - oldest or 0}}
"""

# engine, session: a new process under this name; what an earlier one held, it does not have any more
_OPEN = f"""
local engine, session = unpack(ARGV)
give_back(engine)
call('DEL', P .. 'lost:' .. engine, P .. 'orders:' .. engine)
call('HSET', P .. 'engine:' .. engine, 'session', session, 'seq', 0)
call('PEXPIRE', P .. 'engine:' .. engine, {MEMORY_MS})
"""

# engine, session
_CLOSE = """
local engine, session = unpack(ARGV)
if call('HGET', P .. 'engine:' .. engine, 'session') ~= session then return end
give_back(engine)
call('DEL', P .. 'engine:' .. engine, P .. 'lost:' .. engine, P .. 'orders:' .. engine)
"""

# engine, session, seq, lease ms, load, room in tokens, room in requests, n, n finished ids, m, m (tenant, output
# tokens), then (gateway, batch) ...
_EXCHANGE = f"""
local me, session, seq, lease_ms, load = unpack(ARGV, 1, 5)
local state = P .. 'engine:' .. me
local known = call('HMGET', state, 'session', 'seq', 'reply')
if known[1] and known[1] ~= session then return redis.error_reply('SUPERSEDED') end

local claimed, aborts, lost = {{}}, {{}}, {{}}
if known[2] == seq then  -- all done already, only the reply did not arrive
  claimed, aborts, lost = unpack(cmsgpack.unpack(known[3]))
else
  call('HDEL', state, 'reply')  -- a first write that memory never refuses: exchanges are what empties a full Redis
  local room_tokens, room_requests, after = tonumber(ARGV[6]), tonumber(ARGV[7]), 8 + tonumber(ARGV[8])
  for i = 9, after do
    local id = ARGV[i]
    local holder = call('HGET', P .. 'req:' .. id, 'engine')
    bury(id)
    call('ZREM', P .. 'held:' .. me, id)
    call('ZREM', P .. 'lost:' .. me, id)
    dequeue(id)
    if holder and holder ~= me then order_abort(holder, id) end  -- it took over, but this engine came first
  end
  local charged = after + 1 + 2 * ARGV[after + 1]
  for i = after + 2, charged, 2 do charge(ARGV[i], {OUTPUT_COST} * ARGV[i + 1]) end
  for i = charged + 1, #ARGV, 2 do
    local out = P .. 'out:' .. ARGV[i]
    call('XADD', out, '*', 'b', ARGV[i + 1])
    call('PEXPIRE', out, {STREAM_MS})
  end
  for _, id in ipairs(call('ZRANGE', P .. 'lost:' .. me, 0, -1)) do  -- back before anyone took them: carry on
    if alive(id) and dequeue(id) then hold(me, id) else lost[#lost + 1] = id end
  end
  call('DEL', P .. 'lost:' .. me)
  -- A burst is shared, not won by who asks first: each exchange takes a fair part of what waits, and the next one comes
  -- with the next step.
  local share = math.ceil(call('HLEN', P .. 'waiting') / math.max(1, call('SCARD', P .. 'engines')))
  while #claimed < math.min(room_requests, share) do
    local id = head()
    if not id then break end
    local tokens = tonumber(call('HGET', P .. 'req:' .. id, 'tokens'))
    if tokens > room_tokens then break end
    room_tokens = room_tokens - tokens
    dequeue(id)
    hold(me, id)
    claimed[#claimed + 1] = id
  end
  local room = #claimed < room_requests and room_tokens or 0  -- without a seat the room is of no use
  aborts = call('LRANGE', P .. 'orders:' .. me, 0, -1)
  call('DEL', P .. 'orders:' .. me)
  call('HSET', state, 'session', session, 'seq', seq, 'reply', cmsgpack.pack({{claimed, aborts, lost}}),
       'room', room, 'heard', now_ms())
end
call('SADD', P .. 'engines', me)
call('SET', P .. 'lease:' .. me, load, 'PX', lease_ms)
call('PEXPIRE', state, {MEMORY_MS})
local payloads = {{}}
for _, id in ipairs(claimed) do  -- one withdrawn since the lost reply has none, and an abort on its way
  payloads[#payloads + 1] = call('HGET', P .. 'req:' .. id, 'payload') or nil
end
return {{payloads, aborts, lost, call('HLEN', P .. 'waiting'), call('SCARD', P .. 'engines')}}
"""


class _Script:
    """Lua source behind the prelude, and the SHA-1 by which the server knows it."""

    def __init__(self, body: str) -> None:
        self.source = _PRELUDE + body
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


SUBMIT, CANCEL, FLEET, OPEN, CLOSE, EXCHANGE = map(_Script, (_SUBMIT, _CANCEL, _FLEET, _OPEN, _CLOSE, _EXCHANGE))


# --------------------------------------------------------------------------------------------------------- both ends
class _Link:
    """Connections to one Redis, and the only place that decides to try again."""

    def __init__(self, url: str, namespace: str, *, reply_s: float) -> None:
        """`reply_s`: seconds of silence after which a connection counts as dead.  Raises BusDown: malformed URL."""
        self.prefix = f"{{{namespace}}}:"
        parts = urlsplit(url)
        self._name = f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
        try:
            # Retries are ours (redis-py would repeat what is not safe to repeat); protocol 2 keeps replies of one
            # shape over the supported versions of redis-py.
            pool = aioredis.BlockingConnectionPool.from_url(
                url,
                max_connections=CONNECTIONS,
                timeout=reply_s,
                socket_timeout=reply_s,
                socket_connect_timeout=reply_s,
                health_check_interval=30,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise BusDown(f"{self._name}: {error}") from None
        self.redis = aioredis.Redis.from_pool(pool)

    async def close(self) -> None:
        await self.redis.aclose()

    async def check(self) -> None:
        """Make sure that a server of a fitting version answers.  Raises BusDown."""
        info = await self.run(self.redis.info, PATIENCE_S)
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
            raise BusDown(f"Redis at {self._name} is version {version}; Quire needs 6.2 or later")
        if info.get("maxmemory_policy") != "noeviction":
            log.warning("Redis at %s may evict requests: set maxmemory-policy noeviction", self._name)

    async def script(self, script: _Script, *args: bytes | str | int, patience_s: float = PATIENCE_S) -> Any:
        """Run one script.  Raises BusDown when it did not succeed within `patience_s`; it may have run all the same."""

        async def once() -> Any:
            try:
                return await self.redis.evalsha(script.sha, 1, self.prefix, *args)
            except NoScriptError:  # a new or restarted server
                return await self.redis.eval(script.source, 1, self.prefix, *args)

        return await self.run(once, patience_s)

    async def run(self, command: Callable[[], Awaitable[T]], patience_s: float = math.inf) -> T:
        """Await command() until it succeeds, pausing longer each time.  It must be harmless when it runs twice.

        Raises BusDown after `patience_s` seconds.  Errors that another try can't mend come through as they are.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        pause, longest = BACKOFF_S
        tries = 0
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        cause: Exception | None = None
        while True:
            try:
                async with asyncio.timeout_at(None if patience_s == math.inf else began + patience_s):
                    result = await command()
                if task.cancelling() > cancels:  # redis-py loses a cancellation that comes while it connects
                    raise asyncio.CancelledError
            except (RedisConnectionError, RedisTimeoutError, ResponseError, OSError) as error:
                if isinstance(error, ResponseError) and not _refuses(error):
                    raise
                if cause is None or not isinstance(error, TimeoutError):  # our patience ending says nothing of why
                    cause = error
                left = began + patience_s - clock()
                if left <= 0:
                    raise BusDown(
                        f"Redis at {self._name} did not serve us for {clock() - began:.1f} s: {_one_line(cause)}"
                    ) from cause
                if tries == 1 and patience_s == math.inf:  # not on the first: a single broken connection is no news
                    log.warning("Redis at %s is away, trying on: %s", self._name, _one_line(error))
            else:
                if tries > 1 and patience_s == math.inf:
                    log.warning("Redis at %s is back after %.1f s", self._name, clock() - began)
                return result
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, longest)
            tries += 1


def _refuses(error: ResponseError) -> bool:
    """A healthy connection to a server that cannot do it now: full, loading, failing over, or its disk is failing.

    Looks into the text because Redis 6.2 wraps an error inside a script into a general one.
    """
    return any(word in str(error) for word in ("OOM ", "MISCONF", "READONLY", "LOADING", "MASTERDOWN", "BUSY "))


def _read_abort(order: bytes) -> Abort:
    request_id, _, index = order.decode().partition(" ")
    return Abort(request_id, index=int(index or -1))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or ("no answer" if isinstance(error, TimeoutError) else type(error).__name__)


# ------------------------------------------------------------------------------------------------------- the gateway
class GatewaySide:
    """One gateway's end.  All methods belong to one asyncio loop."""

    def __init__(self, url: str, gateway: str, *, namespace: str = "quire") -> None:
        """`url`: redis://, rediss:// or unix://.  Connects to nothing yet.  Raises BusDown for a malformed URL."""
        self._gateway = gateway
        self._link = _Link(url, namespace, reply_s=PATIENCE_S)
        # Blocking reads have their own connection: one that waits for seconds must not count as dead after two.
        self._reader = _Link(url, namespace, reply_s=2 * BLOCK_MS / 1000)
        self._encode = msgspec.msgpack.Encoder().encode
        self._owed: set[tuple[str, int]] = set()  # withdrawals that have not reached Redis yet: (id, index or -1)

    async def open(self) -> None:
        """Connect, and check the server's version.  Raises BusDown.  The gateway's stream is made by engines."""
        await self._link.check()

    async def close(self) -> None:
        """Disconnect.  Harmless when called twice.  Withdraw what is open first: it would be computed for nobody."""
        await self._link.close()
        await self._reader.close()

    async def submit(self, *requests: Generate, excess_tokens: int | None = None) -> Queue:
        """Queue the prompts of one client's request, durably, all or none, and ring the engines.

        They share tenant, weight, priority and deadline.  None is queued (`accepted` is False) when the prompt tokens
        in the queue, these included, would pass the room the engines report by more than `excess_tokens`; None: never.
        Raises BusDown after PATIENCE_S: not queued.  (If only the reply was lost it may be for a moment; it is
        withdrawn as soon as Redis is back.)
        """
        first = requests[0]
        words: list[bytes | str | int] = []
        for request in requests:
            words += (request.id, self._encode(request), len(request.token_ids))
        excess = "" if excess_tokens is None else excess_tokens
        try:
            accepted, queued, room_tokens, turns = await self._link.script(
                SUBMIT, first.tenant, repr(first.weight), first.priority, first.deadline_ms, excess, *words
            )
        except BusDown:
            self._owed.update((request.id, -1) for request in requests)
            raise
        tenants = _read_turns(*turns)
        return Queue(bool(accepted), queued, sum(turn.queued_tokens for turn in tenants.values()), room_tokens, tenants)

    async def cancel(self, request_id: str, index: int = -1) -> None:
        """Withdraw: an unclaimed request leaves the queue, a claimed one gets an Abort at its engine.  Idempotent.

        With an `index` only that continuation is withdrawn, from whoever computes the request now or later.
        Never raises BusDown: a withdrawal that does not get through in PATIENCE_S goes along with the next fleet().
        """
        self._owed.add((request_id, index))
        with contextlib.suppress(BusDown):
            await self._withdraw()

    async def _withdraw(self) -> None:
        if owed := list(self._owed):
            await self._link.script(CANCEL, *(word for pair in owed for word in pair))
            self._owed.difference_update(owed)

    async def batches(self) -> AsyncIterator[TokenBatch]:
        """Every TokenBatch for this gateway, in order, for ever; reconnects by itself and loses none.

        Asking for the next batch says that those before it are dealt with: they may be trimmed.  Starts with the
        oldest one not trimmed, so a second call, or a restarted gateway of the same name, may see some again.
        """
        decode = msgspec.msgpack.Decoder(TokenBatch).decode
        stream = f"{self._link.prefix}out:{self._gateway}"
        last = "0-0"
        while True:
            reply = await self._reader.run(
                partial(self._reader.redis.xread, {stream: last}, count=READ_COUNT, block=BLOCK_MS)
            )
            for _, entries in cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply):
                for entry_id, fields in entries:
                    yield decode(fields[b"b"])
                    last = entry_id.decode()
            if reply:
                time_ms, _, count = last.partition("-")
                following = f"{time_ms}-{int(count) + 1}"
                await self._reader.run(partial(self._reader.redis.xtrim, stream, minid=following, approximate=False))

    async def fleet(self) -> Fleet:
        """Read the fleet in one round trip, and put what engines with lapsed leases held back at the queue's head.

        Raises BusDown after PATIENCE_S.  Call it at least every second: it is what notices a dead engine.
        """
        await self._withdraw()
        loads, time_ms, queued, room_tokens, turns, oldest_ms = await self._link.script(FLEET)
        tenants = _read_turns(*turns)
        return Fleet(
            [msgspec.msgpack.decode(load, type=EngineLoad) for load in loads],
            queued,
            sum(turn.queued_tokens for turn in tenants.values()),
            time_ms,
            room_tokens,
            tenants,
            oldest_ms,
        )


def _read_turns(scored: list[bytes], tokens: list[bytes], weights: list[bytes]) -> dict[str, Turn]:
    names, counters = scored[::2], scored[1::2]
    return {
        name.decode(): Turn(int(queued), float(counter), float(weight))
        for name, counter, queued, weight in zip(names, counters, tokens, weights, strict=True)
    }


# -------------------------------------------------------------------------------------------------------- the engine
class EngineSide:
    """One engine's end.  All methods belong to one asyncio loop (the loop's I/O thread)."""

    def __init__(self, url: str, engine: str, *, namespace: str = "quire", lease_ms: int = 5000) -> None:
        """`url`: redis://, rediss:// or unix://.  Connects to nothing yet.  Raises BusDown for a malformed URL."""
        self._engine = engine
        self._lease_ms = lease_ms
        self._link = _Link(url, namespace, reply_s=REPLY_S)
        self._bell = self._link.redis.pubsub()
        self._session = uuid.uuid4().hex  # tells this process from an earlier one of the same name
        self._seq = 0
        self._registered = False
        self.queue_share = 0.0  # requests nobody had claimed after the last exchange, over the engines that could
        self._tenants: dict[str, str] = {}  # claimed id -> who pays for its tokens
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Generate).decode

    async def open(self) -> None:
        """Connect; what an earlier process of this name still held goes back to the queue's head.  Raises BusDown.

        The engine counts as one of the fleet from its first exchange on.
        """
        await self._link.check()
        await self._link.script(OPEN, self._engine, self._session)
        self._registered = True
        await self._link.run(self._listen, PATIENCE_S)

    async def close(self) -> None:
        """Give the lease up; whatever is still held goes back to the queue's head.  Never raises BusDown: while Redis
        is away the lease lapses by itself, to the same effect."""
        if self._registered:
            self._registered = False
            with contextlib.suppress(BusDown):
                await self._link.script(CLOSE, self._engine, self._session)
        await self._bell.aclose()  # type: ignore[no-untyped-call]
        await self._link.close()

    async def exchange(
        self,
        batches: list[tuple[str, TokenBatch]],
        finished: list[str],
        load: EngineLoad,
        room_tokens: int,
        room_requests: int,
    ) -> Claimed:
        """One round trip: append each (gateway, batch) to its stream, forget `finished` requests, renew the lease
        with `load`, charge the tenants for the batches' tokens, claim in the queue's order while prompts fit
        `room_tokens` and `room_requests` (0 claims none) and at most a fair share of the queue (all of it over the
        number of engines, rounded up), and take the aborts waiting here.  Nothing past its deadline is claimed: its
        gateway hears so.  Retries with backoff while Redis is away, never loses or repeats a batch.

        Raises BusDown only when a newer process opened the bus under this engine's name.  One at a time; cancelling
        it leaves open what it did, and only close() may follow.
        """
        self._seq += 1
        outgoing: list[bytes | str] = []
        produced: dict[str, int] = {}
        for gateway, batch in batches:
            outgoing += (gateway, self._encode(batch))
            for delta in batch.deltas:
                if (tenant := self._tenants.get(delta.id)) is not None:
                    produced[tenant] = produced.get(tenant, 0) + len(delta.token_ids)
        for request_id in finished:
            self._tenants.pop(request_id, None)
        try:
            payloads, aborts, lost, queued, engines = await self._link.script(
                EXCHANGE,
                self._engine,
                self._session,
                self._seq,
                self._lease_ms,
                self._encode(load),
                room_tokens,
                room_requests,
                len(finished),
                *finished,
                len(produced),
                *(word for pair in produced.items() for word in pair),
                *outgoing,
                patience_s=math.inf,
            )
        except ResponseError as error:
            if "SUPERSEDED" in str(error):
                raise BusDown(f"engine id {self._engine!r} is in use by a newer process") from None
            raise
        claimed = Claimed(
            [self._decode(payload) for payload in payloads],
            [_read_abort(order) for order in aborts],
            [request_id.decode() for request_id in lost],
        )
        self.queue_share = queued / max(1, engines)
        self._tenants.update((request.id, request.tenant) for request in claimed.generates)
        for request_id in claimed.lost:
            self._tenants.pop(request_id, None)
        return claimed

    async def bell(self) -> None:
        """Return when there may be something to claim or an abort to take; spurious returns are fine.

        They happen after a reconnect and every BLOCK_MS at the latest.  A ring between two calls is not lost.
        """
        try:
            await self._bell.get_message(timeout=BLOCK_MS / 1000)
            while await self._bell.get_message(timeout=0) is not None:
                pass  # a burst of rings is one
        except (RedisConnectionError, RedisTimeoutError, OSError):
            await self._link.run(self._listen)

    async def _listen(self) -> None:
        await self._bell.aclose()  # type: ignore[no-untyped-call]  # a half-broken subscription is not worth mending
        await self._bell.subscribe(f"{self._link.prefix}bell", f"{self._link.prefix}bell:{self._engine}")
