"""The Lua scripts in which all of Quire's state moves, a gateway's and then an engine's; `bus.py` alone runs them.

The keys they work on are in `keys.py`, with the functions they share.  A comment above each says what it is given.
"""

from __future__ import annotations

import hashlib

from engine.wire.keys import (
    AMNESTY_MS,
    AWAY_MS,
    CAME_OUTLIERS,
    CAME_S,
    EXPIRY_MS,
    GATEWAY_MS,
    MEMORY_MS,
    OUTPUT_COST,
    PLACES,
    PRELUDE,
    PROMISE_MS,
    PUNCTUAL_MS,
    STREAM_MS,
)

# gateway, tenant, weight, priority, deadline, most tokens queued beyond the room ('' for any number), retain ms,
# idempotency key and body digest ('' for none), record, name (see promises), then (id, payload, prompt tokens, n) ...:
# all or none of them
_SUBMIT = f"""
local gateway, tenant, weight, priority, deadline, excess, retain, once, body, record, name = unpack(ARGV, 1, 11)
local room, twin, asked = room(), {{}}, 0
for i = 14, #ARGV, 4 do asked = asked + ARGV[i] end
local accepted = call('EXISTS', P .. 'req:' .. ARGV[12]) == 1  -- a retry: only the reply did not arrive
if not accepted then
  if once ~= '' then twin = call('HMGET', P .. 'once:' .. once, 'id', 'body') end
  if not twin[1] then
    local tokens = asked
    for _, queued in ipairs(call('HVALS', P .. 'queued_tokens')) do tokens = tokens + queued end
    accepted = excess == '' or tokens <= room + excess
  end
  if accepted then
    for i = 12, #ARGV, 4 do
      local id, payload, size, n = unpack(ARGV, i, i + 3)
      local key, log = P .. 'req:' .. id, P .. 'log:' .. id
      call('HSET', key, 'payload', payload, 'tokens', size, 'tenant', tenant, 'deadline', deadline,
           'place', priority * {PLACES} + call('INCR', P .. 'arrivals'), 'listeners', gateway,
           'since', now_ms())
      call('PEXPIREAT', key, deadline + {EXPIRY_MS})
      call('HSET', log, 'n', n, 'retain', retain)
      if i == 12 then
        call('HSET', log, 'record', record)
        if once ~= '' then call('HSET', log, 'once', once) end
      end
      call('PEXPIREAT', log, deadline + {EXPIRY_MS})
      call('SADD', P .. 'open:' .. gateway, id)
      call('HSET', P .. 'weights', tenant, weight)
      call('HINCRBY', P .. 'usage:' .. tenant, 'requests', 1)
      call('HINCRBY', P .. 'usage:' .. tenant, 'prompt_tokens', size)
      enqueue(id)
    end
    if call('ZREM', P .. 'promises', name) == 0 then came(asked) end
    call('HDEL', P .. 'parts', name)
    if once ~= '' then
      call('HSET', P .. 'once:' .. once, 'id', ARGV[12], 'body', body)
      call('PEXPIREAT', P .. 'once:' .. once, deadline + {EXPIRY_MS})
    end
    call('PUBLISH', P .. 'bell', '')
  end
end
return {{accepted and 1 or 0, call('HLEN', P .. 'waiting'), room, turns(), twin}}
"""

# name, tenant, weight, prompt tokens, 1 for a new promise to who came when told and can't be let in (else 0), then
# Terms: pace, full pace, least ms, most ms, least shares
_PROMISE = f"""
local name, tenant = ARGV[1], ARGV[2]
local weight, tokens, broken, pace, full_pace, least, most, first, last = unpack(ARGV, 3)
local now = now_ms()
for _, missed in ipairs(call('ZRANGEBYSCORE', P .. 'promises', '-inf', now - {PROMISE_MS})) do
  local ms, whose = string.match(call('HGET', P .. 'parts', missed) or '0 ', '^(%d+) (.*)$')
  local till = call('HGET', P .. 'promised', whose)
  if till then call('HSET', P .. 'promised', whose, string.format('%.0f', till - ms)) end
  call('ZREM', P .. 'promises', missed)
  call('HDEL', P .. 'parts', missed)
end
local due = call('ZSCORE', P .. 'promises', name)
if due then
  if due - now > {PUNCTUAL_MS} then return due - now end
  if broken == '0' then return 0 end
  call('ZREM', P .. 'promises', name)
else
  came(tokens)
end
local start, others = now + least, 0
local promised = call('HGETALL', P .. 'promised')
for i = 1, #promised, 2 do
  local till = tonumber(promised[i + 1])
  if promised[i] == tenant then start = math.max(start, till)
  elseif till > now then others = others + (call('HGET', P .. 'weights', promised[i]) or 1)
  else call('HDEL', P .. 'promised', promised[i]) end
end
if start - now > most + 0 then return -1 end
local seconds, newcomers = {{}}, 0
for i = 1, {CAME_S} do seconds[i] = tonumber(call('GET', P .. 'came:' .. (math.floor(now / 1000) - i)) or 0) end
table.sort(seconds)
for i = 1 + {CAME_OUTLIERS}, {CAME_S - CAME_OUTLIERS} do
  newcomers = newcomers + seconds[i] / {CAME_S - 2 * CAME_OUTLIERS}
end
local share = math.max(1 - newcomers / full_pace, first + (last - first) * (start - now) / most)
share = share * weight / (weight + others)
local pause = math.ceil((start - now) / 1000) * 1000  -- Retry-After knows whole seconds
call('HSET', P .. 'weights', tenant, weight)
call('ZADD', P .. 'promises', now + pause, name)
local till = math.min(start + 1000 * tokens / (pace * share), now + 2 * most)
call('HSET', P .. 'promised', tenant, string.format('%.0f', till))
call('HSET', P .. 'parts', name, string.format('%.0f', till - start) .. ' ' .. tenant)
call('PEXPIRE', P .. 'promises', 2 * most + {PROMISE_MS})
call('PEXPIRE', P .. 'parts', 2 * most + {PROMISE_MS})
call('PEXPIRE', P .. 'promised', 2 * most + {PROMISE_MS})
return pause
"""

# gateway, then (id, index) ...; index -1: every continuation
_CANCEL = """
local gateway = ARGV[1]
for i = 2, #ARGV, 2 do
  local id, index = ARGV[i], ARGV[i + 1]
  local key = P .. 'req:' .. id
  local engine, dropped = unpack(call('HMGET', key, 'engine', 'dropped'))
  if index == '-1' then
    if others(id, gateway) == '' then withdraw(id) else unlisten(id, gateway) end
  elseif alive(id) then
    call('HDEL', key, 'dropped')  -- a first write that memory never refuses
    call('HSET', key, 'dropped', (dropped or '') .. ' ' .. index)
    if engine then order(engine, id .. ' ' .. index) end
  end
end
"""

# gateway, grace in ms: a new process under this name; an earlier one's clients have lost it, and come back somewhere
_ADOPT = """
local gateway, grace = unpack(ARGV)
for _, id in ipairs(call('SMEMBERS', P .. 'open:' .. gateway)) do
  unlisten(id, gateway, grace)
end
"""

# gateway, grace in ms before requests of dead gateways are withdrawn, number of this heartbeat
_FLEET = f"""
local me, grace, beat = unpack(ARGV)
local before = call('GET', P .. 'gateway:' .. me)
local known = before and (before == beat or before + 1 == beat + 0) and 1 or 0
call('DEL', P .. 'gateway:' .. me)  -- a first write that memory never refuses
call('SET', P .. 'gateway:' .. me, beat, 'PX', {GATEWAY_MS})
local reached = call('GET', P .. 'reached')
if reached and now_ms() - reached > {AWAY_MS} then call('SET', P .. 'amnesty', 1, 'PX', {AMNESTY_MS}) end
call('SET', P .. 'reached', now_ms())
local counts = call('EXISTS', P .. 'amnesty') == 0
call('SADD', P .. 'gateways', me)
for _, name in ipairs(call('SMEMBERS', P .. 'gateways')) do
  if call('EXISTS', P .. 'gateway:' .. name) == 0 then
    call('SREM', P .. 'gateways', name)
    for _, id in ipairs(call('SMEMBERS', P .. 'open:' .. name)) do
      unlisten(id, name, grace)
    end
    call('DEL', P .. 'open:' .. name, P .. 'out:' .. name)
  end
end
for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'orphans', '-inf', now_ms())) do withdraw(id) end
for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
  if call('EXISTS', P .. 'lease:' .. engine) == 0 then
    give_back(engine, counts)
    call('HINCRBY', P .. 'engine:' .. engine, 'epoch', 1)
    call('PEXPIRE', P .. 'engine:' .. engine, {MEMORY_MS})
  end
end
head()
first_suspect()
local loads, heard = {{}}, {{}}
for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
  loads[#loads + 1] = call('GET', P .. 'lease:' .. engine)
  heard[#heard + 1] = call('HGET', P .. 'engine:' .. engine, 'heard') or '0'
end
local oldest = call('ZRANGE', P .. 'ages', 0, 0, 'WITHSCORES')[2]
return {{loads, now_ms(), call('HLEN', P .. 'waiting'), room(), turns(), known, oldest and now_ms() - oldest or 0,
         call('ZCARD', P .. 'quarantine'), heard}}
"""

# id, the gateway that wants to listen ('' for none)
_ATTACH = """
local id, gateway = unpack(ARGV)
local log = P .. 'log:' .. id
local n, record = unpack(call('HMGET', log, 'n', 'record'))
if not n then return false end
if gateway ~= '' and alive(id) then
  local names, known = listeners(id), false
  for name in each_of(names) do known = known or name == gateway end
  if not known then
    call('SADD', P .. 'open:' .. gateway, id)
    route(id, names == '' and gateway or names .. '\\n' .. gateway)
    call('ZREM', P .. 'orphans', id)
  end
end
fold_all()
local found = {}
for i = 0, n - 1 do
  local finish, head = unpack(call('HMGET', log, 'finish:' .. i, 'head:' .. i))
  found[i + 1] = {call('GET', log .. ':' .. i), finish, head, call('LRANGE', log .. ':' .. i .. ':logprobs', 0, -1)}
end
return {record or '', found}
"""

# id, continuation, output position to begin at, most tokens
_LOG = """
local id, index, first, last = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[3] + ARGV[4] - 1
local log = P .. 'log:' .. id
local key = log .. ':' .. index
if tonumber(index) >= continuations(id) then return false end
local finish, head = unpack(call('HMGET', log, 'finish:' .. index, 'head:' .. index))
-- Nearly always what is read stands in the log: it is slow readers who read it.
if call('STRLEN', key) < 4 * (last + 1) then fold_all() end
if call('STRLEN', key) > 4 * (last + 1) then finish = false end
return {call('GETRANGE', key, 4 * first, 4 * last + 3), finish, head, call('LRANGE', key .. ':logprobs', first, last)}
"""

# idempotency key
_TWIN = """
return call('HMGET', P .. 'once:' .. ARGV[1], 'id', 'body')
"""

# idempotency key, and the request that is no longer to be its first
_RELEASE = """
local key = P .. 'once:' .. ARGV[1]
if call('HGET', key, 'id') == ARGV[2] then call('DEL', key) end
"""

# ids
_KEEP = """
for _, id in ipairs(ARGV) do keep(id) end
"""

# (id, tenant, n, n counts of tokens) ...; returns generated, delivered, and how much of that is new, of each
_SETTLE = """
fold_all()
local found, i = {}, 1
while i <= #ARGV do
  local id, tenant, n = unpack(ARGV, i, i + 2)
  local log, delivered, new = P .. 'log:' .. id, 0, 0
  for index = 0, n - 1 do
    local before = tonumber(call('HGET', log, 'delivered:' .. index) or 0)
    local now = math.max(before, ARGV[i + 3 + index])
    delivered, new = delivered + now, new + now - before
    if now > before and continuations(id) > 0 then call('HSET', log, 'delivered:' .. index, now) end
  end
  if new > 0 then call('HINCRBY', P .. 'usage:' .. tenant, 'delivered', new) end
  found[#found + 1] = {said(id), delivered, new}
  i = i + 3 + n
end
return found
"""

# '' or an id to drop; returns what is left
_QUARANTINED = """
if ARGV[1] ~= '' then
  call('ZREM', P .. 'quarantine', ARGV[1])
  call('DEL', P .. 'quarantine:' .. ARGV[1])
end
local found = {}
for _, id in ipairs(call('ZRANGE', P .. 'quarantine', 0, -1)) do
  local entry = call('HMGET', P .. 'quarantine:' .. id, 'payload', 'attempts', 'said', 'engine', 'at')
  if entry[1] then found[#found + 1] = entry end
end
return found
"""

# id of an audit: orders it of the engines that know how to; their names
_AUDIT = """
local ordered = {}
for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
  local load = call('GET', P .. 'lease:' .. engine)
  if load and (cmsgpack.unpack(load).audits or 0) > 0 then
    order(engine, ARGV[1] .. ' ?')
    ordered[#ordered + 1] = engine
  end
end
return ordered
"""

# engine, session: a new process under this name; what an earlier one held, it does not have any more
_OPEN = f"""
local engine, session = unpack(ARGV)
local state = P .. 'engine:' .. engine
give_back(engine, call('HGET', state, 'session') ~= session)
call('DEL', P .. 'orders:' .. engine)
call('HSET', state, 'session', session, 'seq', 0)
call('PEXPIRE', state, {MEMORY_MS})
return call('HGET', state, 'epoch') or '0'
"""

# engine, session, 1 if it failed (0: a drain).  A failed engine is remembered, as after a lapse: what it was warming is
# not to be warmed by the next one.
_CLOSE = f"""
local engine, session, died = unpack(ARGV)
local state = P .. 'engine:' .. engine
if call('HGET', state, 'session') ~= session then return end
give_back(engine, died == '1')
call('DEL', P .. 'orders:' .. engine)
if died == '1' then
  call('HINCRBY', state, 'epoch', 1)
  call('PEXPIRE', state, {MEMORY_MS})
else
  call('DEL', state)
end
"""

# engine: the loads of the others
_OTHERS = """
local loads = {}
for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
  if engine ~= ARGV[1] then loads[#loads + 1] = call('GET', P .. 'lease:' .. engine) or nil end
end
return loads
"""

# engine, session, seq of its last exchange, lease ms, load, then the ids it holds: see "The token log" in keys.py.
# Returns the epoch, and for each id that it goes on with: who listens, and how many tokens of each continuation the log
# has
_REJOIN = f"""
local me, session, seq, lease_ms, load = unpack(ARGV, 1, 5)
local state = P .. 'engine:' .. me
if (call('HGET', state, 'session') or session) ~= session then return redis.error_reply('SUPERSEDED') end
call('HDEL', state, 'reply')  -- a first write that memory never refuses
fold(me)
local mine, kept = {{}}, {{}}
for i = 6, #ARGV do
  local id = ARGV[i]
  if alive(id) and not call('ZSCORE', P .. 'held:' .. me, id) and call('HGET', P .. 'req:' .. id, 'from') == me
     and dequeue(id) then
    hold(me, id)
  end
  if call('ZSCORE', P .. 'held:' .. me, id) then
    local lengths = {{}}
    for index = 0, continuations(id) - 1 do
      lengths[index + 1] = call('STRLEN', P .. 'log:' .. id .. ':' .. index) / 4
    end
    kept[id] = true
    mine[#mine + 1] = {{id, listeners(id), lengths}}
  end
end
for _, id in ipairs(call('ZRANGE', P .. 'held:' .. me, 0, -1)) do
  if not kept[id] and let_go(me, id) then enqueue(id) end
end
call('HSET', state, 'session', session, 'seq', seq)
call('PEXPIRE', state, {MEMORY_MS})
call('SADD', P .. 'engines', me)
call('SET', P .. 'lease:' .. me, load, 'PX', lease_ms)
return {{call('HGET', state, 'epoch') or '0', mine}}
"""

# false: nothing was done, the engine has to rejoin.
# engine, session, seq, epoch, lease ms, load, room in tokens, room in requests, msgpack of [finished id ...], of
# {{tenant: output tokens ...}} and of [id, continuation, output position, how many tokens, ...], all those tokens in 4
# bytes each, 1 if these pieces leave nothing of the tail, n, n (id, field or "logprobs INDEX FIRST", value) for the
# logs, then (gateway, or '' for none, 1 if it is for the tail, batch) ...
_EXCHANGE = f"""
local function makes_room(me, id, said, lease_ms)  -- whether it is this engine that claims nothing until `id` fits
  if tonumber(call('HGET', P .. 'req:' .. id, 'tokens')) >= said.total_blocks * said.block_size then return false end
  local key = P .. 'making_room'
  if (call('GET', key) or me) ~= me then return false end
  call('SET', key, me, 'PX', lease_ms)
  return true
end

local me, session, seq, epoch, lease_ms, load = unpack(ARGV, 1, 6)
local state = P .. 'engine:' .. me
local known = call('HMGET', state, 'session', 'seq', 'reply', 'epoch', 'trial')
if known[1] and known[1] ~= session then return redis.error_reply('SUPERSEDED') end

local claimed, orders = {{}}, {{}}
if known[2] == seq then  -- all done already, only the reply did not arrive
  claimed, orders = unpack(cmsgpack.unpack(known[3]))
else
  if (known[4] or '0') ~= epoch or (known[2] or -1) + 1 ~= seq + 0 then return false end
  local pieces, tokens, at = cmsgpack.unpack(ARGV[11]), ARGV[12], 1
  for i = 1, #pieces, 4 do
    local id, index, first = unpack(pieces, i, i + 2)
    if call('STRLEN', P .. 'log:' .. id .. ':' .. index) < 4 * first and continuations(id) > 0 then return false end
  end
  call('HDEL', state, 'reply')  -- a first write that memory never refuses: exchanges are what empties a full Redis
  local room_tokens, room_requests = tonumber(ARGV[7]), tonumber(ARGV[8])
  for tenant, tokens in pairs(cmsgpack.unpack(ARGV[10])) do
    charge(tenant, {OUTPUT_COST} * tokens)
    call('HINCRBY', P .. 'usage:' .. tenant, 'generated', tokens)
  end
  for i = 1, #pieces, 4 do
    local id, index, first, count = unpack(pieces, i, i + 3)
    grow(id, index, first, string.sub(tokens, at, at + 4 * count - 1))
    at = at + 4 * count
  end
  local tail = P .. 'tail:' .. me
  if ARGV[13] == '1' then call('DEL', tail) end
  local batches = 15 + 3 * ARGV[14]
  for i = 15, batches - 1, 3 do
    local id, field, value = unpack(ARGV, i, i + 2)
    local index, first = string.match(field, '^logprobs (%d+) (%d+)$')
    if index then
      grow_logprobs(id, index, first, value)
    elseif call('EXISTS', P .. 'log:' .. id) == 1 then
      call('HSET', P .. 'log:' .. id, field, value)
    end
  end
  for i = batches, #ARGV, 3 do
    local gateway, lasting, batch = unpack(ARGV, i, i + 2)
    if lasting == '1' then call('RPUSH', tail, batch) end
    if gateway ~= '' then
      local out = P .. 'out:' .. gateway
      call('XADD', out, '*', 'b', batch)
      call('PEXPIRE', out, {STREAM_MS})
    end
  end
  for _, id in ipairs(cmsgpack.unpack(ARGV[9])) do
    if call('ZREM', P .. 'held:' .. me, id) == 1 then bury(id) end
  end
  local trial = known[5]
  if trial then
    fold(me)
    local attempts = call('HMGET', P .. 'req:' .. trial, 'attempts', 'said')
    if not call('ZSCORE', P .. 'held:' .. me, trial) or not attempts[1] or said(trial) > tonumber(attempts[2]) then
      call('HDEL', P .. 'req:' .. trial, 'attempts', 'said')
      call('HDEL', state, 'trial')
      trial = nil
    end
  end
  local function claim(id)  -- says whether there was room
    local tokens = tonumber(call('HGET', P .. 'req:' .. id, 'tokens'))
    if tokens > room_tokens then return false end
    room_tokens = room_tokens - tokens
    dequeue(id)
    hold(me, id)
    claimed[#claimed + 1] = id
    return true
  end
  local suspect, closed = not trial and room_requests > 0 and first_suspect(), trial
  if suspect and claim(suspect) then
    call('DEL', P .. 'making_room')
    call('HSET', state, 'trial', suspect)
    closed = true
  elseif suspect then
    closed = makes_room(me, suspect, cmsgpack.unpack(load), lease_ms)
  end
  if closed then  -- no request joins a suspect, or takes the room that it needs
    room_tokens = 0
  else
    -- A burst is shared, not won by who asks first: each exchange takes a fair part of what waits, and the next one
    -- comes with the next step.
    local share = math.ceil(call('HLEN', P .. 'waiting') / math.max(1, call('SCARD', P .. 'engines')))
    while #claimed < math.min(room_requests, share) do
      local id = head()
      if not id or not claim(id) then break end
    end
  end
  local left = #claimed < room_requests and room_tokens or 0  -- without a seat the room is of no use
  if not closed and call('EXISTS', P .. 'waiting') == 1 then
    local said, crowd = cmsgpack.unpack(load), {{}}
    for _, tenant in ipairs(said.crowd or {{}}) do crowd[tenant] = true end
    room_tokens = said.yield_tokens or 0
    while room_tokens > 0 do  -- others yield: only where no engine has the room
      local id = head(crowd)
      if not id or tonumber(call('HGET', P .. 'req:' .. id, 'tokens')) <= room(me) or not claim(id) then break end
    end
  end
  orders = call('LRANGE', P .. 'orders:' .. me, 0, -1)
  call('DEL', P .. 'orders:' .. me)
  local told = {{}}
  for _, what in ipairs(orders) do  -- this exchange's tokens, perhaps the last, went to those who listened before
    local id, names = string.match(what, '^(.*) >(.*)$')
    if id then told[id] = names end
  end
  if next(told) then fold(me) end
  for id, names in pairs(told) do tell(id, names) end
  call('HSET', state, 'session', session, 'seq', seq, 'reply', cmsgpack.pack({{claimed, orders}}),
       'room', left, 'heard', now_ms())
end
call('SADD', P .. 'engines', me)
call('SET', P .. 'lease:' .. me, load, 'PX', lease_ms)
call('PEXPIRE', state, {MEMORY_MS})
local works = {{}}
for _, id in ipairs(claimed) do
  local payload, names = unpack(call('HMGET', P .. 'req:' .. id, 'payload', 'listeners'))
  if payload then  -- one withdrawn since the lost reply has none, and an abort on its way
    local outputs, log = {{}}, P .. 'log:' .. id
    for i = 0, continuations(id) - 1 do
      outputs[#outputs + 1] = {{call('GET', log .. ':' .. i), call('HGET', log, 'finish:' .. i)}}
    end
    works[#works + 1] = {{payload, names, outputs}}
  end
end
return {{works, orders, call('HLEN', P .. 'waiting'), call('SCARD', P .. 'engines'), now_ms()}}
"""


class Script:
    """Lua source behind the prelude, and the SHA-1 by which the server knows it."""

    def __init__(self, body: str) -> None:
        self.source = PRELUDE + body
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


# A gateway's and then an engine's.
SUBMIT, PROMISE, CANCEL, ADOPT, FLEET, ATTACH, LOG, KEEP, TWIN, RELEASE, SETTLE = map(
    Script, (_SUBMIT, _PROMISE, _CANCEL, _ADOPT, _FLEET, _ATTACH, _LOG, _KEEP, _TWIN, _RELEASE, _SETTLE)
)
QUARANTINED, AUDIT = map(Script, (_QUARANTINED, _AUDIT))
OPEN, CLOSE, OTHERS, REJOIN, EXCHANGE = map(Script, (_OPEN, _CLOSE, _OTHERS, _REJOIN, _EXCHANGE))
