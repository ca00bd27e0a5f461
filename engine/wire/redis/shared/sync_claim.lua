-- Claims in a sync: isolated suspects first, then a share of the lanes, then requests of tenants below their share.
--
-- `x` is the sync: its named arguments (sync.lua), the bytes `load`, and the results of the claims:
--   claimed   {id, cached prompt tokens, 1 if it was passed over before} of each claimed request
--   works     the reply's entry for each claimed request
--   orders    control messages for the engine
--   blocked   prompt tokens of the next request, which does not fit; nil: the next request fits, or none waits
-- Each claim reduces `x.free_tokens` and `x.claim_tokens`.

-- Returns the reply's entry for a claimed request.  `from`: the engine that held it before; false: none, so its log is
-- empty.
local function work_of(payload, names, from, id, held, waited)
  local outputs, log = {}, P .. 'log:' .. id
  if from then
    for i = 0, choice_count(id) - 1 do
      outputs[i + 1] = {call('GET', log .. ':' .. i), call('HGET', log, 'finish:' .. i)}
    end
  end
  return {payload, names, outputs, held, waited}
end

-- Claims a request if its `size` prompt tokens fit; returns whether they fit.  `lane`: nil for a suspect.  `request`:
-- the result of `choose` in locality.lua; nil without prefix locality.
local function claim_request(x, lane, id, size, request)
  if size > x.free_tokens then return false end
  x.free_tokens = x.free_tokens - size
  local payload, names, from, place, tenant, dropped, prefixes = unpack(call('HMGET', P .. 'req:' .. id,
    'payload', 'listeners', 'from', 'place', 'tenant', 'dropped', 'prefixes'))
  local held, waited = request and request.held or 0, request and request.waited and 1 or 0
  if x.publishes ~= '' and prefixes then add_prefixes(x.engine, prefixes, held) end
  if lane then leave_queue(lane, tenant, id, size, #payload) else call('ZREM', P .. 'suspects', id) end
  count_share(x.late_share, lane, size)
  hold(x.engine, id, place, tenant, size)
  if dropped then  -- choices that were withdrawn while an earlier engine held the request
    for index in string.gmatch(dropped, '%d+') do x.orders[#x.orders + 1] = id .. ' ' .. index end
  end
  held = held > 0 and prefix_tokens(held) or 0
  x.claim_tokens = x.claim_tokens - (size - held)
  x.claimed[#x.claimed + 1] = {id, held, waited}
  x.works[#x.claimed] = work_of(payload, names, from, id, held, waited)
  return true
end

-- Returns whether the suspect that the engine runs in isolation is not cleared yet.  Clears a suspect that has ended or
-- produced a token.
local function runs_suspect(x, suspect)
  flush_tail(x.engine)
  local attempts, before = unpack(call('HMGET', P .. 'req:' .. suspect, 'attempts', 'said'))
  if call('ZSCORE', P .. 'held:' .. x.engine, suspect) and attempts and logged_tokens(suspect) <= tonumber(before) then
    return true
  end
  call('HDEL', P .. 'req:' .. suspect, 'attempts', 'said')
  call('HDEL', P .. 'engine:' .. x.engine, 'trial')
  return false
end

-- Returns whether this engine must free capacity for the first suspect, of `size` prompt tokens, by claiming nothing.
-- Only one engine does so at a time.
local function waits_for_capacity(x, size)
  local report = cmsgpack.unpack(x.load)
  if size >= report[LOAD_TOTAL_BLOCKS] * report[LOAD_BLOCK_SIZE] then return false end
  local key = P .. 'making_room'
  if (call('GET', key) or x.engine) ~= x.engine then return false end
  call('SET', key, x.engine, 'PX', x.lease_ms)
  return true
end

-- Lets the engine run a suspect in isolation, without other new requests.  Returns whether the engine may claim no
-- other request now.  `suspect`: id of the suspect that it runs already, or nil.
local function isolates(x, suspect)
  if suspect and runs_suspect(x, suspect) then return true end
  if x.free_requests == 0 then return false end
  local first, size = first_suspect()
  if not first or leaves(x, first) then return false end
  if not claim_request(x, nil, first, size) then return waits_for_capacity(x, size) end
  call('DEL', P .. 'making_room')
  call('HSET', P .. 'engine:' .. x.engine, 'trial', first)
  return true
end

-- Claims this engine's share of the waiting requests.  One sync claims at most waiting requests / engines, so that a
-- burst spreads over all engines; the next sync follows with the next step.  A request that does not fit ends the
-- claim, because smaller requests behind it would keep it waiting.  A request that exceeds `claim_tokens` also ends it:
-- requests that this engine cannot compute yet stay in the lanes, in order.
--
-- Engines that publish their prefixes choose by prefix among the requests that fairness and lanes allow (locality.lua).
-- While any engine lacks a LoRA adapter, all engines choose this way.
-- Returns the ms after which the engine should sync again; 0: no such time.
local function claim_share(x, waiting, engines)
  local most, left_out = math.min(x.free_requests, math.ceil(waiting / math.max(1, engines))), {}
  local choose, note_claim, finish
  if most > 0 and (x.publishes ~= '' and engines > 1 or x.lacking) and call('EXISTS', P .. 'prefixes') == 1 then
    local me = {name = x.engine, token_us = x.token_us, step_us = x.step_us, backlog = x.backlog,
                load_us = x.load_us, loads = x.loads, publishes = x.publishes ~= '', lacking = x.lacking}
    choose, note_claim, finish = chooser(me, now_ms())
  end
  while #x.claimed < most and x.claim_tokens > 0 do
    local lane, id, size, tenant, due = next_request(x.late_share, left_out)
    if not id then break end
    if size > x.free_tokens then
      x.blocked = size
      break
    end
    if not choose then
      claim_request(x, lane, id, size)
    else
      local request = choose(lane, tenant, {id = id, size = size, due = due}, x.free_tokens)
      if not request then
        leave_out(left_out, lane, tenant)
      else
        if not claim_request(x, lane, request.id, request.size, request) then
          x.blocked = request.size
          break
        end
        note_claim(lane, request)
        note_turn(left_out, lane, tenant)
      end
    end
  end
  if not choose then return 0 end
  local retry
  retry, x.backlog = finish()
  return retry
end

-- Claims requests of tenants below their share, up to the tokens that this engine can free by preempting tenants over
-- their share (`preemptible_tokens`), if no other engine has free capacity for these requests.  A tenant that has
-- sequences here may have less left (LOAD_PREEMPTIBLE_OF): its further requests stay in the queue, for engines at which
-- it holds less.
local function claim_by_preemption(x)
  local over, load = {}, cmsgpack.unpack(x.load)
  local left_of = load[LOAD_PREEMPTIBLE_OF] or {}
  for _, tenant in ipairs(load[LOAD_CROWD]) do
    for _, lane in ipairs(LANES) do leave_out(over, lane, tenant) end
  end
  local claim_tokens = x.claim_tokens
  x.free_tokens, x.claim_tokens = x.preemptible_tokens, x.preempt_claim_tokens
  local elsewhere = capacity_elsewhere(x.engine)
  while x.free_tokens > 0 and x.claim_tokens > 0 do
    local lane, id, size, tenant = 'on_time', head('on_time', over)
    if not id then lane, id, size, tenant = 'late', head('late', over) end
    if not id or size <= elsewhere then break end
    local left = left_of[tenant] or x.preemptible_tokens
    if size > left or leaves(x, id) then
      leave_out(over, lane, tenant)
    elseif not claim_request(x, lane, id, size) then
      break
    else
      left_of[tenant] = left - size
    end
  end
  x.preemptible_tokens, x.preempt_claim_tokens, x.claim_tokens = x.free_tokens, x.claim_tokens, claim_tokens
end
