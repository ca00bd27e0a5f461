-- One exchange of an engine: enter and send its tokens, end requests, claim requests, take orders, renew the lease.
-- `claim_tokens`: prompt tokens to claim at once; the prompt that exceeds them is the last one.
-- `finished`: ids.  `produced`: {tenant = output tokens}.  `pieces`: id, continuation, output position, tokens, ... of
-- what goes into the logs; `tokens`: all of those, 4 bytes each.  `empties_tail`: '1' if the pieces leave nothing of
-- the tail.  `late_share`: least share of the claimed prompt tokens that the late lane gets.
-- `publishes`: '1' if the engine publishes which prefixes it holds, 'afresh' if `added` are all of them, else ''.
-- `added`, `removed`: digests.  `token_us`: of a prompt token, 0 if not known.  `step_us`: of a step without prompts.
-- `backlog`: prompt tokens that it has still to compute.
-- Then `extras` times (id, field or "logprobs INDEX FIRST", value) for the logs.
-- Then for each batch: gateway ('' for none), 1 if the batch is for the tail, msgpack TokenBatch.
-- Returns false if nothing was done and the engine has to rejoin.  Otherwise returns {
--   {{payload, listeners, {{tokens, Finish} of each continuation}, prompt tokens held, 1 if it was passed over before}
--     for each claimed request},
--   orders, requests waiting, engines, Redis' unix ms, 1 if a gateway watches the engines' blocks,
--   ms after which the engine should ask again, because it has left a request to another one; 0: it has left none
-- }.
local engine, session, seq, epoch, lease_ms, load = unpack(ARGV, 1, 6)
local room_tokens, room_requests, claim_tokens, finished, produced, pieces = unpack(ARGV, 7, 12)
local tokens, empties_tail, late_share, publishes, added, removed = unpack(ARGV, 13, 18)
local token_us, step_us, backlog, extras = unpack(ARGV, 19, 22)
local EXTRAS, BATCHES = 23, 23 + 3 * extras  -- where they begin in ARGV
local state, tail = P .. 'engine:' .. engine, P .. 'tail:' .. engine
room_tokens, room_requests, late_share = tonumber(room_tokens), tonumber(room_requests), tonumber(late_share)
claim_tokens = tonumber(claim_tokens)

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

local function publish_prefixes()
  local key = P .. 'prefixes:' .. engine
  if publishes ~= '1' then call('DEL', key) end
  each_part('SREM', key, removed)
  each_part('SADD', key, added)
end

local claimed = {}  -- {id, prompt tokens held, 1 if it was passed over before} each

local function claim(id, size, request)  -- returns whether there was room for its `size` prompt tokens
  if size > room_tokens then return false end
  room_tokens = room_tokens - size
  if publishes ~= '' then
    local prefixes = request and request.prefixes or call('HGET', P .. 'prefixes', id) or ''
    add_prefixes(engine, prefixes, request and request.held or 0)
  end
  count_share(late_share, dequeue(id), size)
  hold(engine, id)
  local held = request and request.held > 0 and prefix_tokens(request.held) or 0
  claim_tokens = claim_tokens - (size - held)
  claimed[#claimed + 1] = {id, held, request and request.passed and 1 or 0}
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
-- follows with the next step.  A request that does not fit ends the claim: smaller ones would keep it waiting.  So does
-- one that exceeds `claim_tokens`: what this engine cannot compute yet stays in the lanes, in their order.
--
-- Where several engines publish their prefixes, they choose within what fairness and lanes allow (locality.lua).
-- Returns the ms after which the engine should ask again, 0 for no such time.
local function claim_share()
  local waiting, engines, now = call('HLEN', P .. 'waiting'), call('SCARD', P .. 'engines'), now_ms()
  local share, left, me = math.ceil(waiting / math.max(1, engines)), {}, nil
  local most = math.min(room_requests, share)
  if publishes ~= '' and engines > 1 and most > 0 and call('EXISTS', P .. 'prefixes') == 1 then
    me = {name = engine, token_us = tonumber(token_us), step_us = tonumber(step_us), backlog = tonumber(backlog),
          windows = {}, passed = {on_time = {}, late = {}}}
  end
  while #claimed < most and claim_tokens > 0 do
    local lane, id, size, tenant = next_request(late_share, left)
    if not id or size > room_tokens then break end
    if not me then
      claim(id, size)
    else
      local request = choose(me, lane, tenant, {id = id, size = size}, room_tokens, now)
      if not request then
        left[lane] = left[lane] or {}
        left[lane][tenant] = true
      else
        if not claim(request.id, request.size, request) then break end
        note_claim(me, lane, request)
      end
    end
  end
  if not me then return 0 end
  backlog = me.backlog
  note_passed(me, now)
  return me.retry and math.max(1, math.ceil(me.retry - now)) or 0
end

-- What a retry of this exchange gets, and how many prompt tokens the engine would still claim: for submits and other
-- engines.
local function record(reply, left)
  local now = now_ms()
  call('HSET', state, 'session', session, 'seq', seq, 'reply', reply, 'room', left, 'heard', now)
  if publishes ~= '' and left > 0 then
    call('HSET', P .. 'spare', engine, struct.pack('<ddddd', left, now, token_us, step_us, backlog))
  else
    call('HDEL', P .. 'spare', engine)
  end
end

-- Where no other engine has room, claim for tenants outside the crowd, as far as requests of the crowd would yield.
local function claim_from_crowd()
  local report, crowd = cmsgpack.unpack(load), {}
  for _, tenant in ipairs(report.crowd or {}) do crowd[tenant] = true end
  room_tokens = report.yield_tokens or 0
  while room_tokens > 0 and claim_tokens > 0 do
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

local function describe(id, held, left)  -- what the engine gets of a claimed request; nil for one withdrawn since
  local payload, names = unpack(call('HMGET', P .. 'req:' .. id, 'payload', 'listeners'))
  if not payload then return nil end  -- its reply was lost, and an abort follows
  local outputs, log = {}, P .. 'log:' .. id
  for i = 0, continuations(id) - 1 do
    outputs[#outputs + 1] = {call('GET', log .. ':' .. i), call('HGET', log, 'finish:' .. i)}
  end
  return {payload, names, outputs, held, left}
end

local known_session, known_seq, known_reply, known_epoch, trial = unpack(
  call('HMGET', state, 'session', 'seq', 'reply', 'epoch', 'trial'))
if known_session and known_session ~= session then return redis.error_reply('SUPERSEDED') end

local orders, retry
if known_seq == seq then  -- a retry: everything is done, only the reply did not arrive
  claimed, orders, retry = unpack(cmsgpack.unpack(known_reply))
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
  publish_prefixes()
  -- No request joins a suspect, or takes the room that it needs.
  local closed = trial and still_on_trial(trial) or claim_suspect()
  retry = 0
  if closed then room_tokens = 0 else retry = claim_share() end
  local left = #claimed < room_requests and room_tokens or 0  -- without a slot the room is of no use
  if not closed and call('EXISTS', P .. 'waiting') == 1 then claim_from_crowd() end
  orders = take_orders()
  record(cmsgpack.pack({claimed, orders, retry}), left)
end
call('SADD', P .. 'engines', engine)
call('SET', P .. 'lease:' .. engine, load, 'PX', lease_ms)
if publishes ~= '' then call('PEXPIRE', P .. 'prefixes:' .. engine, lease_ms) end
call('PEXPIRE', state, MEMORY_MS)
local works = {}
for _, one in ipairs(claimed) do works[#works + 1] = describe(unpack(one)) end
local watched = call('EXISTS', P .. 'watch')
return {works, orders, call('HLEN', P .. 'waiting'), call('SCARD', P .. 'engines'), now_ms(), watched, retry}
