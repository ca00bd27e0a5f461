"""Every Redis key and TTL of Quire, and the Lua functions that more than one of its scripts (`scripts.py`) needs.

Every key starts with "{namespace}:"; the braces are Redis' hash tag, so that one deployment shares one cluster slot.

    key              type     what                                           written by        goes away
    arrivals         string   number of the last request queued              submit            never
    queue:TENANT     zset     waiting id -> place (see below)                submit, claim..   with its members
    waiting          hash     waiting id -> "TOKENS TENANT"                  as queue:TENANT   with its members
    ages             zset     waiting id -> unix ms of its submit            as queue:TENANT   with its members
    queued_tokens    hash     tenant -> prompt tokens in queue:TENANT        as queue:TENANT   with the queue
    turns            zset     tenant with a queue -> its counter             as queue:TENANT   with the queue
    counters         hash     tenant -> virtual tokens it was served         claim, exchange   never
    weights          hash     tenant -> weight                               submit, promise   never
    left             string   the tenant whose queue emptied last            as queue:TENANT   never
    promises         zset     name of a refused request -> unix ms at which  promise           submit, or PROMISE
                              it was told to return                                            after that
    parts            hash     name of a refused request -> "MS TENANT": what   promise         with its promise
                              its promise takes of what the tenant has
    came:SECOND      string   prompt tokens that came for the first time in  submit, promise   CAME
                              that second of unix time
    promised         hash     tenant -> unix ms until which what it was      promise           with the last promise
                              promised takes up what is promised at all
    req:ID           hash     payload (msgpack Generate), tokens, place,     submit, claim     at its end, or EXPIRY
                              since (unix ms of its submit), tenant,                           after its deadline
                              deadline (unix ms), engine (who
                              claimed it), from (who held it last and        lapse, close
                              holds it no more), listeners (gateways,
                              one a line), dropped (indices of               attach, cancel
                              continuations nobody wants any more),
                              attempts and said (see Poison)                 lapse
                     hash     gone=1: ended, and a late retry must not       finish, cancel    TOMBSTONE
                              bring it back
    log:ID           hash     n, retain (ms), record (the gateway's, see     submit            `retain` after the
                              submit), once (its idempotency key), and by                      request's end, as do
                              continuation I: finish:I (msgpack Finish),     exchange          the two below
                              head:I (msgpack [cached tokens, prompt
                              logprobs], only where there are any) and
                              delivered:I (tokens its clients got)           settle
    log:ID:I         string   its output so far, 4 bytes a token, little     exchange, or
                              endian                                         who reads
    log:ID:I:logprobs list    msgpack TokenLogprob of each of them, where    exchange
                              they were asked for
    tail:ENGINE      list     msgpack TokenBatch: what its last exchanges    exchange          when the logs have
                              said, as far as the logs may lack it                             it; of TAIL exchanges
                                                                                               and TAIL_BYTES at most
    once:KEY         hash     id and body digest of the request that came    submit            with its log
                              first under an idempotency key
    usage:TENANT     hash     requests (one a prompt), prompt_tokens,        submit            never
                              generated and                                  exchange
                              delivered (output tokens)                      settle
    gateways         set      gateways that may be alive                     fleet             when found dead
    gateway:NAME     string   number of its last heartbeat                   fleet             GATEWAY
    open:GATEWAY     set      ids of requests it listens to                  submit, attach    at their end
    reached          string   unix ms of the last reading of the fleet       fleet             never
    amnesty          string   Redis was away: lapses are no deaths           fleet             AMNESTY
    orphans          zset     id that no live gateway listens to -> unix     fleet             attach, end
                              ms at which it is withdrawn
    suspects         zset     id that may have killed its engine -> place    lapse             claim, end
    making_room      string   the engine that claims nothing until the first   exchange          claim, or lease_ms
                              suspect fits                                                     after its exchange
    quarantine       zset     id -> unix ms of its verdict                   lapse             drop, QUARANTINED
    quarantine:ID    hash     payload, attempts, said, engine, at            lapse             as its id above
    engines          set      engines that may have a lease                  exchange          lapse, close
    lease:ENGINE     string   msgpack EngineLoad                             exchange          lease_ms
    engine:ENGINE    hash     session, epoch (how often its lease lapsed),   open, exchange    close, MEMORY
                              seq and reply of its last exchange, room
                              (prompt tokens it would still claim after
                              it), heard (unix ms of it), trial (the
                              suspect it runs), warming (manifest.py)
    held:ENGINE      zset     claimed id -> place                            claim, finish     finish, lapse, close
    orders:ENGINE    list     "ID": abort it; "ID INDEX": one of its         cancel, claim     next exchange, MEMORY
                              continuations; "ID >GATEWAYS": who listens;
                              "ID ?": audit yourself, and say so in          audit
    audit:ID         hash     engine -> what is wrong there, or ''           EngineSide        AUDIT_S (bus.py)
    out:GATEWAY      stream   b = msgpack TokenBatch, one entry a step       exchange          trimmed when read, and
                                                                                               STREAM after the last
    hot:, heat:      hash,    hot prefixes of a model: see manifest.py       reused            with their heat
    FINGERPRINT      zset
    bell             channel  "there may be something to claim"              submit, lapse..
    bell:ENGINE      channel  "there may be an order for you"                cancel

Order.  Within a tenant a request's place is PLACES * its priority + its arrival number, so what a dead engine held goes
back to exactly where it stood.  Between tenants the one with the smallest counter goes first: the Virtual Token Counter
(VTC) of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.  A counter grows by (prompt tokens, when
they are claimed, + OUTPUT_COST * output tokens, as they are produced) / weight.  A tenant that had nothing waiting is
lifted to the smallest counter of those that have, or to that of the last to leave when nobody has: idleness saves
nothing up.  Whoever is first is served while there is room, so no room stays empty.
Where an engine has none its load says for whom others would yield there, and how much (engine/core/policy/fairness.py).

Reservations.  What is queued is what is booked: an engine's exchange says how much room it has, less what it claims in
it, and submit queues only while all that is queued stays within all that room plus the excess its caller allows.  Both
happen inside one script, so any number of gateways can't spend the same room twice, and a dead gateway's bookings live
and end with its requests.

Promises.  Who is refused is told when to return, and the fleet remembers, whichever gateway is asked next.  A refused
request goes by what it asks, so a client need not carry anything; who returns too early hears the same time again.
Promises are handed out one behind the other, at a share of the pace at which engines start prompts: what those who
come for the first time leave of it, as far as the last seconds tell.  A crowd that came at once says nothing of who
will come next, so the seconds in which most came are left out, and as many in which least did.  Where newcomers leave
nothing there is still a share, the larger the later the promise, so that a long crowd still gets a time.  What was kept
for somebody who does not come, even PROMISE_MS late, is promised to others.

The token log.  What a client may have seen stands in the log, or in the tail of the engine that said it, and nothing
else does.  The exchange that appends a TokenBatch to a gateway's stream appends it to the tail as well, in one atomic
step.  Once in TAIL exchanges, or TAIL_BYTES, the engine sends all that its requests have said meanwhile, each in one
piece, and that replaces the tail.  A reader of a log first appends what the tails have.  Every piece says at
which output position it begins: what the log has already is skipped, and where it would leave a hole nothing is done
at all.

A claim hands the log out, so a request goes on from there.  It follows that only one engine may write to a log.  When
its lease lapses an engine's epoch moves on, and an exchange of an earlier epoch is refused as a whole: a zombie can't
write, whenever it wakes.  So is one that does not follow on the last exchange, or would leave a hole: Redis has lost
what it had acknowledged.  In both cases the engine rejoins: it says what it holds, keeps what nobody else has taken,
sends again what those logs lack, and what it did not name goes back to the queue.

The ledger.  What a tenant used stands in usage:TENANT.  `generated` grows in the exchange that brings the tokens, so it
is what the engines produced, whoever dies; `delivered` when a gateway says how far a client got, who was served or has
left.  Of each output position only the first delivery counts, wherever a client goes on reading.

Poison.  Three things count an attempt for each request that an engine held: its lease lapsed, another process started
under its name, or it closed as failed.  A lapse after Redis was away counts none (AWAY_MS): it says nothing about the
engine.  A request that has gained tokens since its last attempt begins again at 1.  One whose attempts reach
MAX_ATTEMPTS has killed its engine, or so it looks, that often at the same token.  If it is the only one
it is quarantined.  If there are several, all but one are innocent: they are set aside as suspects, and an engine claims
one of them at a time and nothing else beside it, until it has said a token (it is acquitted) or ended.  Who is on trial
when its engine dies is guilty.

A suspect may need more room than any engine has.  Then one engine (`making_room`), large enough when empty, claims
nothing else until the suspect fits, and the others keep claiming.  An engine with the room takes the suspect at once.

All state moves inside Lua scripts, each atomic, and each harmless when it runs twice, because a
reply may be lost after the server has done the work: submit finds the id present, cancel finds it gone, and exchange
carries a sequence number whose last reply the server remembers.
"""

from __future__ import annotations

EXPIRY_MS = 60_000  # a request outlives its deadline by this, in case nobody is left to end it
TOMBSTONE_MS = 10_000  # longer than any retry of a submit
STREAM_MS = 600_000  # a stream nobody reads goes away this long after its last entry
PROMISE_MS = 5_000  # who returns later than this after the time it was told counts as new
PUNCTUAL_MS = 50  # so much too early is in time
CAME_S = 10  # whole seconds that newcomers are counted over
CAME_OUTLIERS = 2  # of them, left out at either end
CAME_MS = 1000 * (CAME_S + 2)
TAIL = 16  # exchanges after which an engine enters what it has said in the logs
TAIL_BYTES = 2**20  # of batches there, after which it does so sooner: entering them keeps Redis busy for milliseconds
MEMORY_MS = 3_600_000  # how long a silent engine is remembered
GATEWAY_MS = 5_000  # a gateway that has not read the fleet for so long is dead
OUTPUT_COST = 2  # an output token costs a tenant as much as so many prompt tokens (VTC's w_q / w_p)
PLACES = 2**40  # arrivals before a priority class would run into the next; times 2**13 classes a double is exact
AWAY_MS = 1_000  # no gateway has read the fleet for so long: Redis was not reachable, or all gateways were stopped
# After that, leases that lapse for so long are not counted as deaths: engines take up to 5 s to connect again.
AMNESTY_MS = 10_000
STALE_MS = 3_000  # an engine not heard of for so long has no room, though its lease still runs
MAX_ATTEMPTS = 2  # deaths of an engine at the same token of a request
QUARANTINE = 100  # most requests kept there: the oldest leaves
QUARANTINED_MS = 7 * 86_400_000  # and how long

# KEYS[1] is the prefix; every other key is made from it.  When its memory is full, Redis refuses a script whose first
# write takes memory, and none that began with a delete.  So submit and attach are refused before they did anything, and
# the others, which make room in the end, always run.

PRELUDE = f"""
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

local function came(tokens)  -- for the first time
  local key = P .. 'came:' .. math.floor(now_ms() / 1000)
  call('INCRBY', key, tokens)
  call('PEXPIRE', key, {CAME_MS})
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
  if not entry then return call('ZREM', P .. 'suspects', id) == 1 end
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

local function order(engine, what)  -- see orders:ENGINE
  local key = P .. 'orders:' .. engine
  call('RPUSH', key, what)
  call('PEXPIRE', key, {MEMORY_MS})
  call('PUBLISH', P .. 'bell:' .. engine, '')
end

-- the log

local function live_with_log(id, key)  -- a new key of the log goes when the log does
  local ms = call('PTTL', P .. 'log:' .. id)
  if ms > 0 then call('PEXPIRE', key, ms) else call('DEL', key) end
end

local function continuations(id)  -- how many, 0 without a log
  return tonumber(call('HGET', P .. 'log:' .. id, 'n') or 0)
end

-- Append these tokens, 4 bytes each, of which the first stands at output position `first`; what is there is skipped.
local function grow(id, index, first, tokens)
  local key = P .. 'log:' .. id .. ':' .. index
  local length = call('STRLEN', key)
  local skip = length - 4 * first
  if skip < 0 or skip >= #tokens then return end
  if skip > 0 then tokens = string.sub(tokens, skip + 1) end
  call('APPEND', key, tokens)
  if length == 0 then live_with_log(id, key) end
end

local function grow_logprobs(id, index, first, values)  -- the same; each value has its length, 4 bytes, before it
  local key = P .. 'log:' .. id .. ':' .. index .. ':logprobs'
  local length, at = call('LLEN', key), 1
  local skip = length - first
  if skip < 0 then return end
  while at <= #values do
    local size = struct.unpack('<I', values, at)
    if skip > 0 then skip = skip - 1 else call('RPUSH', key, string.sub(values, at + 4, at + 3 + size)) end
    at = at + 4 + size
  end
  if length == 0 then live_with_log(id, key) end
end

local function fold(engine)  -- enter its tail in the logs
  local key = P .. 'tail:' .. engine
  local batches = call('LRANGE', key, 0, -1)
  if #batches == 0 then return end
  call('DEL', key)  -- a first write that memory never refuses
  for _, batch in ipairs(batches) do
    for _, delta in ipairs(cmsgpack.unpack(batch).deltas) do
      local id, first, tokens, index = delta[1], delta[2], delta[3], delta[5]
      for i, token in ipairs(tokens) do tokens[i] = struct.pack('<I', token) end
      grow(id, index, first, table.concat(tokens))
    end
  end
end

local function fold_all()
  for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do fold(engine) end
end

local function said(id)  -- tokens in the log, all continuations together; without the tail
  local bytes = 0
  for i = 0, continuations(id) - 1 do bytes = bytes + call('STRLEN', P .. 'log:' .. id .. ':' .. i) end
  return bytes / 4
end

local function finish_open(id, finish)  -- write this msgpack Finish for every continuation that has none
  local log = P .. 'log:' .. id
  for i = 0, continuations(id) - 1 do call('HSETNX', log, 'finish:' .. i, finish) end
end

-- who listens

local function listeners(id)
  return call('HGET', P .. 'req:' .. id, 'listeners') or ''
end

local function each_of(names)  -- an iterator
  return string.gmatch(names, '[^\\n]+')
end

local function route(id, names)  -- from now on these gateways listen
  local key = P .. 'req:' .. id
  call('HSET', key, 'listeners', names)
  local engine = call('HGET', key, 'engine')
  if engine then order(engine, id .. ' >' .. names) end
end

-- Tell these gateways how far the log has come: an empty Delta at the log's end for each continuation, with its
-- Finish if there is one.  Whoever has less reads the log.
local function tell(id, names)
  local log, n = P .. 'log:' .. id, continuations(id)
  local deltas = {{}}
  for i = 0, n - 1 do
    deltas[#deltas + 1] = string.char(0x95) .. cmsgpack.pack(id, call('STRLEN', log .. ':' .. i) / 4, {{}})
                          .. (call('HGET', log, 'finish:' .. i) or string.char(0xc0)) .. cmsgpack.pack(i)
  end
  local batch = string.char(0x82) .. cmsgpack.pack('engine', '', 'deltas')
                .. string.char(0xdc, math.floor(n / 256), n % 256) .. table.concat(deltas)
  for name in each_of(names) do
    local out = P .. 'out:' .. name
    call('XADD', out, '*', 'b', batch)
    call('PEXPIRE', out, {STREAM_MS})
  end
end

-- endings

local function keep(id)  -- its log goes `retain` ms from now
  local log = P .. 'log:' .. id
  local retain, once = unpack(call('HMGET', log, 'retain', 'once'))
  if not retain then return end
  for i = 0, continuations(id) - 1 do
    call('PEXPIRE', log .. ':' .. i, retain)
    call('PEXPIRE', log .. ':' .. i .. ':logprobs', retain)
  end
  call('PEXPIRE', log, retain)
  if once then call('PEXPIRE', P .. 'once:' .. once, retain) end
end

local function bury(id)  -- it is over: its log stays for a while
  local key = P .. 'req:' .. id
  local names = listeners(id)
  call('DEL', key)
  call('HSET', key, 'gone', 1)
  call('PEXPIRE', key, {TOMBSTONE_MS})
  for name in each_of(names) do call('SREM', P .. 'open:' .. name, id) end
  call('ZREM', P .. 'orphans', id)
  keep(id)
end

local function withdraw(id)
  local engine = call('HGET', P .. 'req:' .. id, 'engine')
  local waited = dequeue(id)
  bury(id)
  finish_open(id, cmsgpack.pack({{'cancelled'}}))
  if engine and not waited then order(engine, id) end
end

local function others(id, gateway)  -- who else listens
  local rest = {{}}
  for name in each_of(listeners(id)) do
    if name ~= gateway then rest[#rest + 1] = name end
  end
  return table.concat(rest, '\\n')
end

local function unlisten(id, gateway, grace)  -- once nobody listens, the request may wait `grace` ms for somebody
  local rest = others(id, gateway)
  call('SREM', P .. 'open:' .. gateway, id)
  if alive(id) then
    route(id, rest)
    if rest == '' then call('ZADD', P .. 'orphans', now_ms() + grace, id) end
  end
end

local function end_with(id, finish)  -- what an engine would say, where no engine has it
  finish_open(id, cmsgpack.pack(finish))
  tell(id, listeners(id))
  bury(id)
end

local function in_time(id, now)  -- whether somebody still wants it; otherwise it leaves
  local payload, deadline = unpack(call('HMGET', P .. 'req:' .. id, 'payload', 'deadline'))
  if payload and tonumber(deadline) > now then return true end
  dequeue(id)
  if payload then end_with(id, {{'deadline'}}) end
  return false
end

local function head(crowd)  -- the id whose turn it is, of tenants not in `crowd`; those whose time ran out leave here
  local now = now_ms()
  while true do
    local tenant
    for _, name in ipairs(call('ZRANGE', P .. 'turns', 0, crowd and -1 or 0)) do
      if not (crowd and crowd[name]) then tenant = name break end
    end
    if not tenant then return nil end
    local id = call('ZRANGE', P .. 'queue:' .. tenant, 0, 0)[1]
    if in_time(id, now) then return id end
  end
end

local function first_suspect()  -- the same for those set aside
  local now = now_ms()
  while true do
    local id = call('ZRANGE', P .. 'suspects', 0, 0)[1]
    if not id then return nil end
    if in_time(id, now) then return id end
  end
end

local function room(me)  -- prompt tokens that the engines, but for `me`, would still claim
  local oldest, room = now_ms() - {STALE_MS}, 0
  for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
    local left, heard = unpack(call('HMGET', P .. 'engine:' .. engine, 'room', 'heard'))
    if engine ~= me and heard and tonumber(heard) >= oldest and call('EXISTS', P .. 'lease:' .. engine) == 1 then
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

local function hold(engine, id)
  local key = P .. 'req:' .. id
  local place, tenant, tokens, dropped = unpack(call('HMGET', key, 'place', 'tenant', 'tokens', 'dropped'))
  call('ZADD', P .. 'held:' .. engine, place, id)
  call('HSET', key, 'engine', engine)
  charge(tenant, tokens)
  for index in string.gmatch(dropped or '', '%d+') do  -- before an earlier engine died
    order(engine, id .. ' ' .. index)
  end
end

local function condemn(id, engine)
  local payload, attempts, at = unpack(call('HMGET', P .. 'req:' .. id, 'payload', 'attempts', 'said'))
  local key, now = P .. 'quarantine:' .. id, now_ms()
  call('HSET', key, 'payload', payload, 'attempts', attempts, 'said', at, 'engine', engine, 'at', now)
  call('PEXPIRE', key, {QUARANTINED_MS})
  call('ZADD', P .. 'quarantine', now, id)
  call('PEXPIRE', P .. 'quarantine', {QUARANTINED_MS})
  while call('ZCARD', P .. 'quarantine') > {QUARANTINE} do
    call('DEL', P .. 'quarantine:' .. call('ZPOPMIN', P .. 'quarantine')[1])
  end
  end_with(id, {{'error', -1, 'the engine died ' .. attempts .. ' times at this request, which is now in quarantine'}})
end

local function accuse(engine, ids)  -- it died and held these: count, and set aside who is suspected
  local trial = call('HGET', P .. 'engine:' .. engine, 'trial')
  local stuck = {{}}
  for _, id in ipairs(ids) do
    local key, now = P .. 'req:' .. id, said(id)
    local attempts, before = unpack(call('HMGET', key, 'attempts', 'said'))
    attempts = tonumber(before or -1) == now and attempts + 1 or 1
    call('HSET', key, 'attempts', attempts, 'said', now)
    if attempts >= {MAX_ATTEMPTS} then
      stuck[#stuck + 1] = id
      if id == trial then stuck = {{id}} break end
    end
  end
  if #stuck == 1 then
    condemn(stuck[1], engine)
  else
    for _, id in ipairs(stuck) do call('ZADD', P .. 'suspects', call('HGET', P .. 'req:' .. id, 'place'), id) end
  end
end

local function let_go(engine, id)  -- it is not held any more
  local key = P .. 'req:' .. id
  call('ZREM', P .. 'held:' .. engine, id)
  if not alive(id) then return false end
  call('HDEL', key, 'engine')
  call('HSET', key, 'from', engine)
  charge(call('HGET', key, 'tenant'), -call('HGET', key, 'tokens'))
  return true
end

-- All it holds goes back to where it stood.  `died`: it did not close.
local function give_back(engine, died)
  fold(engine)
  local ids, held = {{}}, call('ZRANGE', P .. 'held:' .. engine, 0, -1)
  call('DEL', P .. 'held:' .. engine, P .. 'lease:' .. engine)
  call('SREM', P .. 'engines', engine)
  for _, id in ipairs(held) do
    if let_go(engine, id) then ids[#ids + 1] = id end
  end
  if died then accuse(engine, ids) end
  call('HDEL', P .. 'engine:' .. engine, 'trial')
  for _, id in ipairs(ids) do
    if alive(id) and not call('ZSCORE', P .. 'suspects', id) then enqueue(id) end
  end
  if #ids > 0 then call('PUBLISH', P .. 'bell', '') end
end
"""
