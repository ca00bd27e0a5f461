-- One exchange of an engine: enter and send its tokens, end requests, claim requests, take orders, renew the lease.
-- `claim_tokens`: prompt tokens to claim at once; the prompt that exceeds them is the last one.
-- `finished`: ids.  `produced`: {tenant = output tokens}.  `pieces`: id, continuation, output position, tokens, ... of
-- what goes into the logs; `tokens`: all of those, 4 bytes each.  `empties_tail`: '1' if the pieces leave nothing of
-- the tail, which has something.  `late_share`: least share of the claimed prompt tokens that the late lane gets.
-- `publishes`: '1' if the engine publishes which prefixes it holds, 'afresh' if `added` are all of them, else ''.
-- `added`, `removed`: digests.  `token_us`: of a prompt token, 0 if not known.  `step_us`: of a step without prompts.
-- `backlog`: prompt tokens that it has still to compute.  `yield_tokens`: as in `load`.
-- Then `extras` times (id, field or "logprobs INDEX FIRST", value) for the logs.
-- Then for each token message: its channel ('' for none), the message.  `tails`: '1' if they go into the tail.
-- Returns false if nothing was done and the engine has to rejoin.  Otherwise returns {
--   {{payload, listeners, {{tokens, Finish} of each continuation}, prompt tokens held, 1 if it was passed over before}
--     for each claimed request; no continuations where no engine has held it before},
--   orders, requests waiting, engines, Redis' unix ms, 1 if a gateway watches the engines' blocks,
--   ms after which the engine should ask again, because it has left a request to another one; 0: it has left none,
--   1 if Redis had no digests of this engine: they expire with a lease that it did not renew in time
-- }.
local engine, session, seq, epoch, lease_ms, load = unpack(ARGV, 1, 6)
local room_tokens, room_requests, claim_tokens, finished, produced, pieces = unpack(ARGV, 7, 12)
local tokens, empties_tail, late_share, publishes, added, removed = unpack(ARGV, 13, 18)
local token_us, step_us, backlog, yield_tokens, tails, extras = unpack(ARGV, 19, 24)
local EXTRAS, MESSAGES = 25, 25 + 3 * extras  -- where they begin in ARGV
local state, tail = P .. 'engine:' .. engine, P .. 'tail:' .. engine
room_tokens, room_requests, late_share = tonumber(room_tokens), tonumber(room_requests), tonumber(late_share)
claim_tokens, yield_tokens = tonumber(claim_tokens), tonumber(yield_tokens)

local function leaves_hole()  -- whether a piece begins beyond the end of its log
  for i = 1, #pieces, 4 do
    local id, index, first = unpack(pieces, i, i + 2)
    if call('STRLEN', P .. 'log:' .. id .. ':' .. index) < 4 * first and continuations(id) > 0 then return true end
  end
  return false
end

local claimed, works = {}, {}  -- {id, prompt tokens held, 1 if it was passed over before} each; what the engine gets
local orders = {}
local blocked  -- prompt tokens of the request that comes next and does not fit

-- What the engine gets of a claimed request.  `from`: false if no engine has held it before, so its log has nothing.
local function work(payload, names, from, id, held, waited)
  local outputs, log = {}, P .. 'log:' .. id
  if from then
    for i = 0, continuations(id) - 1 do
      outputs[i + 1] = {call('GET', log .. ':' .. i), call('HGET', log, 'finish:' .. i)}
    end
  end
  return {payload, names, outputs, held, waited}
end

-- Returns whether there was room for its `size` prompt tokens.  `lane`: nil for a suspect.  `request`: what choose has
-- returned (locality.lua); nil where nothing was chosen.
local function claim(lane, id, size, request)
  if size > room_tokens then return false end
  room_tokens = room_tokens - size
  local payload, names, from, place, tenant, dropped, prefixes = unpack(call('HMGET', P .. 'req:' .. id,
    'payload', 'listeners', 'from', 'place', 'tenant', 'dropped', 'prefixes'))
  local held, waited = request and request.held or 0, request and request.waited and 1 or 0
  if publishes ~= '' and prefixes then add_prefixes(engine, prefixes, held) end
  if lane then leave_queue(lane, tenant, id, size, #payload) else call('ZREM', P .. 'suspects', id) end
  count_share(late_share, lane, size)
  hold(engine, id, place, tenant, size)
  if dropped then  -- continuations that were withdrawn before an earlier engine died
    for index in string.gmatch(dropped, '%d+') do orders[#orders + 1] = id .. ' ' .. index end
  end
  held = held > 0 and prefix_tokens(held) or 0
  claim_tokens = claim_tokens - (size - held)
  claimed[#claimed + 1] = {id, held, waited}
  works[#claimed] = work(payload, names, from, id, held, waited)
  return true
end

-- Whether this engine claims nothing else now: no request joins a suspect, or takes the room that it needs.
local function tries_suspect(trial)
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
    if size >= report[LOAD_TOTAL_BLOCKS] * report[LOAD_BLOCK_SIZE] then return false end
    local key = P .. 'making_room'
    if (call('GET', key) or engine) ~= engine then return false end
    call('SET', key, engine, 'PX', lease_ms)
    return true
  end

  if trial and still_on_trial(trial) then return true end
  if room_requests == 0 then return false end
  local suspect, size = first_suspect()
  if not suspect then return false end
  if not claim(nil, suspect, size) then return makes_room(size) end
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
local function claim_share(waiting, engines)
  local most, left_out = math.min(room_requests, math.ceil(waiting / math.max(1, engines))), {}
  local choose, note_claim, finish
  if publishes ~= '' and engines > 1 and most > 0 and call('EXISTS', P .. 'prefixes') == 1 then
    local me = {name = engine, token_us = tonumber(token_us), step_us = tonumber(step_us), backlog = tonumber(backlog)}
    choose, note_claim, finish = chooser(me, now_ms())
  end
  while #claimed < most and claim_tokens > 0 do
    local lane, id, size, tenant, due = next_request(late_share, left_out)
    if not id then break end
    if size > room_tokens then
      blocked = size
      break
    end
    if not choose then
      claim(lane, id, size)
    else
      local request = choose(lane, tenant, {id = id, size = size, due = due}, room_tokens)
      if not request then
        leave_out(left_out, lane, tenant)
      else
        if not claim(lane, request.id, request.size, request) then
          blocked = request.size
          break
        end
        note_claim(lane, request)
        note_turn(left_out, lane, tenant)
      end
    end
  end
  if not choose then return 0 end
  local retry
  retry, backlog = finish()
  return retry
end

local known_session, known_seq, known_epoch, trial, known_room = unpack(
  call('HMGET', state, 'session', 'seq', 'epoch', 'trial', 'room'))
if known_session and known_session ~= session then return redis.error_reply('SUPERSEDED') end
local repeated = known_seq == seq  -- a retry: everything is done, only the reply did not arrive
if not repeated then
  if (known_epoch or '0') ~= epoch or (known_seq or -1) + 1 ~= seq + 0 then return false end
  pieces = cmsgpack.unpack(pieces)
  if leaves_hole() then return false end
end

call('PEXPIRE', state, MEMORY_MS)  -- a first write that full memory never refuses: exchanges are what empties Redis
renew_lease(engine, load, lease_ms)
local waiting, engines = call('HLEN', P .. 'waiting'), call('ZCARD', P .. 'engines')
-- The digests are renewed with the lease.  The engine sends differences, so it must learn where there are none.
local vanished = publishes ~= '' and 1 - call('PEXPIRE', P .. 'prefixes:' .. engine, lease_ms) or 0
if repeated then
  local retry, before
  claimed, orders, retry, before = unpack(cmsgpack.unpack(call('HGET', state, 'reply')))
  for _, one in ipairs(claimed) do
    local payload, names, from = unpack(call('HMGET', P .. 'req:' .. one[1], 'payload', 'listeners', 'from'))
    if payload then works[#works + 1] = work(payload, names, from, unpack(one)) end  -- else withdrawn: an abort follows
  end
  vanished = math.max(vanished, before)
  return {works, orders, waiting, engines, now_ms(), call('EXISTS', P .. 'watch'), retry, vanished}
end

-- Charge the output, enter it in the logs, send it.
for tenant, count in pairs(cmsgpack.unpack(produced)) do
  charge(tenant, OUTPUT_COST * count)
  call('HINCRBY', P .. 'usage:' .. tenant, 'generated', count)
end
local at = 1
for i = 1, #pieces, 4 do
  local id, index, first, count = unpack(pieces, i, i + 3)
  append_tokens(id, index, first, string.sub(tokens, at, at + 4 * count - 1))
  at = at + 4 * count
end
if empties_tail == '1' then call('DEL', tail) end
for i = EXTRAS, MESSAGES - 1, 3 do
  local id, field, value = unpack(ARGV, i, i + 2)
  local index, first = string.match(field, '^logprobs (%d+) (%d+)$')
  if index then
    append_logprobs(id, index, first, value)
  elseif call('EXISTS', P .. 'log:' .. id) == 1 then
    call('HSET', P .. 'log:' .. id, field, value)
  end
end
for i = MESSAGES, #ARGV, 2 do
  local channel, message = unpack(ARGV, i, i + 1)
  if tails == '1' then call('RPUSH', tail, message) end
  if channel ~= '' then call('PUBLISH', P .. 'tokens:' .. channel, message) end
end

for _, id in ipairs(cmsgpack.unpack(finished)) do
  if call('ZREM', P .. 'held:' .. engine, id) == 1 then bury(id) end
end
if publishes == 'afresh' then call('DEL', P .. 'prefixes:' .. engine) end
if removed ~= '' then each_part('SREM', P .. 'prefixes:' .. engine, removed) end
if added ~= '' then each_part('SADD', P .. 'prefixes:' .. engine, added) end

-- Three keys that are rarely there, at once.
local rare = call('EXISTS', P .. 'suspects', P .. 'orders:' .. engine, P .. 'watch') > 0
local closed, retry = (trial or rare) and tries_suspect(trial), 0
if closed then room_tokens = 0 elseif waiting > 0 then retry = claim_share(waiting, engines) end
local room_left = #claimed < room_requests and room_tokens or 0  -- without a slot the room is of no use

-- Where no other engine has room, claim for tenants outside the crowd, as far as requests of the crowd would yield.
if waiting > 0 and yield_tokens > 0 and not closed then
  local crowd = {}
  for _, tenant in ipairs(cmsgpack.unpack(load)[LOAD_CROWD]) do
    for _, lane in ipairs(LANES) do leave_out(crowd, lane, tenant) end
  end
  room_tokens = yield_tokens
  local elsewhere = free_room(engine)
  while room_tokens > 0 and claim_tokens > 0 do
    local lane, id, size = 'on_time', head('on_time', crowd)
    if not id then lane, id, size = 'late', head('late', crowd) end
    if not id or size <= elsewhere or not claim(lane, id, size) then break end
  end
end

if rare then
  local routed = {}
  for _, text in ipairs(call('LRANGE', P .. 'orders:' .. engine, 0, -1)) do
    orders[#orders + 1] = text
    local id, names = string.match(text, '^(.*) >(.*)$')
    if id then routed[id] = names end  -- this exchange's tokens, perhaps the last, went to the earlier listeners
  end
  call('DEL', P .. 'orders:' .. engine)
  if next(routed) then fold(engine) end
  for id, names in pairs(routed) do send_log_ends(id, names) end
end

if publishes == 'afresh' or vanished == 1 and (added ~= '' or #claimed > 0) then  -- the key is new
  call('PEXPIRE', P .. 'prefixes:' .. engine, lease_ms)
  if publishes == 'afresh' then vanished = 0 end
end

offer(engine, room_left, now_ms() + math.min(STALE_MS, lease_ms), known_room or '0')
-- Who claims now may be woken again.  Who has left requests waiting wakes others: see "Bells" in KEYS.md.
local claims_more = room_left > 0 and claim_tokens > 0
if waiting > LEFT and (#claimed > 0 or blocked or known_room ~= '0' and not claims_more)
   or closed and #claimed > 0 and call('EXISTS', P .. 'suspects') == 1 then ring(blocked or '1') end
if claims_more then
  call('ZADD', P .. 'bells', room_left, engine)
elseif known_room ~= '0' then
  call('ZREM', P .. 'bells', engine)
end
-- What a retry of this exchange gets, and for submits and other engines how many prompt tokens it would still claim.
call('HSET', state, 'seq', seq, 'reply', cmsgpack.pack({claimed, orders, retry, vanished}), 'room', room_left)
if publishes ~= '' and room_left > 0 then
  call('HSET', P .. 'spare', engine, struct.pack('<ddddd', room_left, now_ms(), token_us, step_us, backlog))
elseif known_room ~= '0' then  -- with 0 it is not there
  call('HDEL', P .. 'spare', engine)
end
if seq == '1' then engines = engines + call('ZADD', P .. 'engines', 0, engine) end  -- REJOIN does it later
return {works, orders, waiting - LEFT, engines, now_ms(), rare and call('EXISTS', P .. 'watch') or 0, retry,
        vanished}
