-- One exchange of an engine: enter and send its tokens, end requests, claim requests, take orders, renew the lease.
-- `finished`: ids.  `produced`: {tenant = output tokens}.  `pieces`: id, continuation, output position, tokens, ... of
-- what goes into the logs; `tokens`: all of those, 4 bytes each.  `empties_tail`: '1' if the pieces leave nothing of
-- the tail.  `late_share`: least share of the claimed prompt tokens that the late lane gets.
-- Then `extras` times (id, field or "logprobs INDEX FIRST", value) for the logs.
-- Then for each batch: gateway ('' for none), 1 if the batch is for the tail, msgpack TokenBatch.
-- Returns false if nothing was done and the engine has to rejoin.  Otherwise returns {
--   {{payload, listeners, {{tokens, Finish} of each continuation}} for each claimed request},
--   orders, requests waiting, engines, Redis' unix ms, 1 if a gateway watches the engines' blocks
-- }.
local engine, session, seq, epoch, lease_ms, load = unpack(ARGV, 1, 6)
local room_tokens, room_requests, finished, produced, pieces = unpack(ARGV, 7, 11)
local tokens, empties_tail, late_share, extras = unpack(ARGV, 12, 15)
local EXTRAS, BATCHES = 16, 16 + 3 * extras  -- where they begin in ARGV
local state, tail = P .. 'engine:' .. engine, P .. 'tail:' .. engine
room_tokens, room_requests, late_share = tonumber(room_tokens), tonumber(room_requests), tonumber(late_share)

local function leaves_hole()  -- whether a piece begins beyond the end of its log
  for i = 1, #pieces, 4 do
    local id, index, first = unpack(pieces, i, i + 2)
    if call('STRLEN', P .. 'log:' .. id .. ':' .. index) < 4 * first and continuations(id) > 0 then return true end
  end
  return false
end

local function charge_output()
  for tenant, count in pairs(cmsgpack.unpack(produced)) do
    charge(tenant, OUTPUT_COST * count)
    call('HINCRBY', P .. 'usage:' .. tenant, 'generated', count)
  end
end

local function enter_pieces()
  local at = 1
  for i = 1, #pieces, 4 do
    local id, index, first, count = unpack(pieces, i, i + 3)
    append_tokens(id, index, first, string.sub(tokens, at, at + 4 * count - 1))
    at = at + 4 * count
  end
end

local function enter_extras()
  for i = EXTRAS, BATCHES - 1, 3 do
    local id, field, value = unpack(ARGV, i, i + 2)
    local index, first = string.match(field, '^logprobs (%d+) (%d+)$')
    if index then
      append_logprobs(id, index, first, value)
    elseif call('EXISTS', P .. 'log:' .. id) == 1 then
      call('HSET', P .. 'log:' .. id, field, value)
    end
  end
end

local function send_batches()
  for i = BATCHES, #ARGV, 3 do
    local gateway, lasting, batch = unpack(ARGV, i, i + 2)
    if lasting == '1' then call('RPUSH', tail, batch) end
    if gateway ~= '' then
      local out = P .. 'out:' .. gateway
      call('XADD', out, '*', 'b', batch)
      call('PEXPIRE', out, STREAM_MS)
    end
  end
end

local function bury_finished()
  for _, id in ipairs(cmsgpack.unpack(finished)) do
    if call('ZREM', P .. 'held:' .. engine, id) == 1 then bury(id) end
  end
end

local function still_on_trial(suspect)  -- a suspect that has ended, or produced a token, is acquitted
  fold(engine)
  local attempts, before = unpack(call('HMGET', P .. 'req:' .. suspect, 'attempts', 'said'))
  if call('ZSCORE', P .. 'held:' .. engine, suspect) and attempts and logged_tokens(suspect) <= tonumber(before) then
    return true
  end
  call('HDEL', P .. 'req:' .. suspect, 'attempts', 'said')
  call('HDEL', state, 'trial')
  return false
end

local function makes_room(size)  -- whether this is the one engine that claims nothing until the first suspect fits
  local report = cmsgpack.unpack(load)
  if size >= report.total_blocks * report.block_size then return false end
  local key = P .. 'making_room'
  if (call('GET', key) or engine) ~= engine then return false end
  call('SET', key, engine, 'PX', lease_ms)
  return true
end

local claimed = {}  -- ids

local function claim(id, size)  -- returns whether there was room for its `size` prompt tokens
  if size > room_tokens then return false end
  room_tokens = room_tokens - size
  count_share(late_share, dequeue(id), size)
  hold(engine, id)
  claimed[#claimed + 1] = id
  return true
end

local function claim_suspect()  -- returns whether this engine claims nothing else now
  if room_requests == 0 then return false end
  local suspect, size = first_suspect()
  if not suspect then return false end
  if not claim(suspect, size) then return makes_room(size) end
  call('DEL', P .. 'making_room')
  call('HSET', state, 'trial', suspect)
  return true
end

-- All engines share a burst, whichever asks first: each exchange takes a fair part of what waits, and the next exchange
-- follows with the next step.  A request that does not fit ends the claim: smaller ones would keep it waiting.
local function claim_share()
  local share = math.ceil(call('HLEN', P .. 'waiting') / math.max(1, call('SCARD', P .. 'engines')))
  while #claimed < math.min(room_requests, share) do
    local id, size = next_request(late_share)
    if not id or not claim(id, size) then break end
  end
end

-- Where no other engine has room, claim for tenants outside the crowd, as far as requests of the crowd would yield.
local function claim_from_crowd()
  local report, crowd = cmsgpack.unpack(load), {}
  for _, tenant in ipairs(report.crowd or {}) do crowd[tenant] = true end
  room_tokens = report.yield_tokens or 0
  while room_tokens > 0 do
    local id, size = head('on_time', crowd)
    if not id then id, size = head('late', crowd) end
    if not id or size <= room(engine) or not claim(id, size) then break end
  end
end

local function take_orders()
  local orders, routed = call('LRANGE', P .. 'orders:' .. engine, 0, -1), {}
  call('DEL', P .. 'orders:' .. engine)
  for _, text in ipairs(orders) do  -- this exchange's tokens, perhaps the last, went to the earlier listeners
    local id, names = string.match(text, '^(.*) >(.*)$')
    if id then routed[id] = names end
  end
  if next(routed) then fold(engine) end
  for id, names in pairs(routed) do send_log_ends(id, names) end
  return orders
end

local function describe(id)  -- what the engine gets of a claimed request; nil for one withdrawn since
  local payload, names = unpack(call('HMGET', P .. 'req:' .. id, 'payload', 'listeners'))
  if not payload then return nil end  -- its reply was lost, and an abort follows
  local outputs, log = {}, P .. 'log:' .. id
  for i = 0, continuations(id) - 1 do
    outputs[#outputs + 1] = {call('GET', log .. ':' .. i), call('HGET', log, 'finish:' .. i)}
  end
  return {payload, names, outputs}
end

local known_session, known_seq, known_reply, known_epoch, trial = unpack(
  call('HMGET', state, 'session', 'seq', 'reply', 'epoch', 'trial'))
if known_session and known_session ~= session then return redis.error_reply('SUPERSEDED') end

local orders
if known_seq == seq then  -- a retry: everything is done, only the reply did not arrive
  claimed, orders = unpack(cmsgpack.unpack(known_reply))
else
  if (known_epoch or '0') ~= epoch or (known_seq or -1) + 1 ~= seq + 0 then return false end
  pieces = cmsgpack.unpack(pieces)
  if leaves_hole() then return false end
  call('HDEL', state, 'reply')  -- a first write that full memory never refuses: exchanges are what empties Redis
  charge_output()
  enter_pieces()
  if empties_tail == '1' then call('DEL', tail) end
  enter_extras()
  send_batches()
  bury_finished()
  -- No request joins a suspect, or takes the room that it needs.
  local closed = trial and still_on_trial(trial) or claim_suspect()
  if closed then room_tokens = 0 else claim_share() end
  local left = #claimed < room_requests and room_tokens or 0  -- without a slot the room is of no use
  if not closed and call('EXISTS', P .. 'waiting') == 1 then claim_from_crowd() end
  orders = take_orders()
  call('HSET', state, 'session', session, 'seq', seq, 'reply', cmsgpack.pack({claimed, orders}),
       'room', left, 'heard', now_ms())
end
call('SADD', P .. 'engines', engine)
call('SET', P .. 'lease:' .. engine, load, 'PX', lease_ms)
call('PEXPIRE', state, MEMORY_MS)
local works = {}
for _, id in ipairs(claimed) do works[#works + 1] = describe(id) end
local watched = call('EXISTS', P .. 'watch')
return {works, orders, call('HLEN', P .. 'waiting'), call('SCARD', P .. 'engines'), now_ms(), watched}
