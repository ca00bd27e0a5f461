-- The queue: two lanes.  Each lane orders its tenants by their virtual token counters, and each tenant's requests by
-- their queue positions (`place`).
--
--   submit --> on_time --claim--> engine <--claim-- late <-- submit
--                 '--- past its due time (move_to_late) ---^

local LANES = {'on_time', 'late'}  -- engines claim in this order, except for the late lane's share (lanes.lua)

local LATE  -- cached result of late_waits, updated with the late lane

local function late_waits()  -- whether any request waits in the late lane
  if LATE == nil then LATE = call('EXISTS', P .. 'turns:late') == 1 end
  return LATE
end

local function charge(tenant, tokens)  -- add tokens / weight to the tenant's counter; negative: a refund
  local counter = call('HINCRBYFLOAT', P .. 'counters', tenant, tokens / (call('HGET', P .. 'weights', tenant) or 1))
  call('ZADD', P .. 'turns:on_time', 'XX', counter, tenant)
  if late_waits() then call('ZADD', P .. 'turns:late', 'XX', counter, tenant) end
end

local function in_queue(tenant)  -- whether a request of the tenant waits in any lane
  return call('ZSCORE', P .. 'turns:on_time', tenant) or late_waits() and call('ZSCORE', P .. 'turns:late', tenant)
end

local function lift(tenant)  -- raise a returning tenant's counter to the smallest in the queue: idling saves no credit
  local counter, floor = tonumber(call('HGET', P .. 'counters', tenant) or 0), nil
  for _, lane in ipairs(LANES) do
    local least = call('ZRANGE', P .. 'turns:' .. lane, 0, 0, 'WITHSCORES')[2]
    if least and (not floor or tonumber(least) < tonumber(floor)) then floor = least end
  end
  floor = floor or call('HGET', P .. 'counters', call('GET', P .. 'left') or '') or 0
  if counter < tonumber(floor) then call('HSET', P .. 'counters', tenant, floor) end
end

-- Estimates the prompt tokens of the tenant's on-time requests that a new request of this size class would precede:
-- their number times the mean prompt length.  They are larger than the mean, so the estimate is too low.
local function on_time_behind(tenant, priority, size_class)
  local queue = P .. 'queue:on_time:' .. tenant
  local behind = call('ZCOUNT', queue, priority * PLACES + (size_class + 1) * SIZES, '+inf')
  if behind == 0 then return 0 end
  return behind / call('ZCARD', queue) * call('HGET', P .. 'queued_tokens:on_time', tenant)
end

local function enter_lane(lane, tenant, id, place, tokens, since)
  call('ZADD', P .. 'turns:' .. lane, call('HGET', P .. 'counters', tenant) or 0, tenant)
  call('ZADD', P .. 'queue:' .. lane .. ':' .. tenant, place, id)
  call('ZADD', P .. 'ages:' .. lane, since, id)
  call('HINCRBY', P .. 'queued_tokens:' .. lane, tenant, tokens)
  call('HINCRBY', P .. 'lanes', lane, tokens)
  if lane == 'late' then LATE = true end
end

local function leave_lane(lane, tenant, id, tokens)  -- returns whether no request of the tenant is left in the lane
  call('ZREM', P .. 'queue:' .. lane .. ':' .. tenant, id)
  call('ZREM', P .. 'ages:' .. lane, id)
  if lane == 'on_time' then call('ZREM', P .. 'due', id) end
  if call('HINCRBY', P .. 'lanes', lane, -tokens) == 0 then call('HDEL', P .. 'lanes', lane) end
  if call('HINCRBY', P .. 'queued_tokens:' .. lane, tenant, -tokens) > 0  -- no prompt is empty
     or call('EXISTS', P .. 'queue:' .. lane .. ':' .. tenant) == 1 then return false end
  call('HDEL', P .. 'queued_tokens:' .. lane, tenant)
  call('ZREM', P .. 'turns:' .. lane, tenant)
  if lane == 'late' then
    LATE = nil
    if not late_waits() then call('DEL', P .. 'late_credit') end
  end
  return true
end

local function waiting_entry(id)  -- prompt tokens, payload bytes, lane and tenant of a request; nil: it does not wait
  local entry = call('HGET', P .. 'waiting', id)
  if entry then return string.match(entry, '^(%d+) (%d+) (%S+) (.*)$') end
end

-- Put a request into the queue, at its lane and place.  A request that has produced tokens goes to the front of its
-- tenant's on-time lane, because its client is reading.
local function enqueue(id)
  local key = P .. 'req:' .. id
  local tokens, place, tenant, since, lane, due, size_class, prefixes = unpack(
    call('HMGET', key, 'tokens', 'place', 'tenant', 'since', 'lane', 'due', 'size_class', 'prefixes'))
  local bytes = call('HSTRLEN', key, 'payload')
  if logged_tokens(id) > 0 then
    lane, place, due = 'on_time', place - FRONT, nil
    call('HDEL', key, 'due')
  elseif lane == 'on_time' then
    place = place + size_class * SIZES
  end
  if not in_queue(tenant) then lift(tenant) end
  enter_lane(lane, tenant, id, place, tokens, since)
  if lane == 'on_time' and due then call('ZADD', P .. 'due', due, id) end
  call('HSET', P .. 'waiting', id, tokens .. ' ' .. bytes .. ' ' .. lane .. ' ' .. tenant)
  call('INCRBY', P .. 'queued_bytes', bytes)
  if prefixes then call('HSET', P .. 'prefixes', id, prefixes) end
end

local LEFT = 0  -- number of requests that have left the queue in this script

local function leave_queue(lane, tenant, id, tokens, bytes)  -- remove a waiting request from the queue
  local last = leave_lane(lane, tenant, id, tokens)
  LEFT = LEFT + 1
  call('HDEL', P .. 'waiting', id)
  call('HDEL', P .. 'prefixes', id)
  call('HDEL', P .. 'passed', id)
  if call('DECRBY', P .. 'queued_bytes', bytes) == 0 then call('DEL', P .. 'queued_bytes') end
  if last and not in_queue(tenant) then call('SET', P .. 'left', tenant) end
end

local function dequeue(id)  -- remove the request from the queue or the suspects; returns whether it was in one of them
  local tokens, bytes, lane, tenant = waiting_entry(id)
  if not tokens then return call('ZREM', P .. 'suspects', id) == 1 end
  leave_queue(lane, tenant, id, tokens, bytes)
  return true
end

-- Remove a tenant whose queue Redis has evicted from a lane.  If no tenant is left, all sums over the queue restart.
local function forget_queue(lane, tenant)
  local tokens = call('HGET', P .. 'queued_tokens:' .. lane, tenant) or 0
  call('HDEL', P .. 'queued_tokens:' .. lane, tenant)
  call('ZREM', P .. 'turns:' .. lane, tenant)
  call('HINCRBY', P .. 'lanes', lane, 0 - tokens)  -- -0 would be no integer
  LATE = nil
  if call('EXISTS', P .. 'turns:on_time', P .. 'turns:late') > 0 then return end
  call('DEL', P .. 'lanes', P .. 'waiting', P .. 'prefixes', P .. 'passed', P .. 'queued_bytes', P .. 'due',
       P .. 'late_credit')
  for _, name in ipairs(LANES) do call('DEL', P .. 'queued_tokens:' .. name, P .. 'ages:' .. name) end
end

local function move_to_late(id)  -- move a request past its due time from the on-time lane to the late lane
  local key = P .. 'req:' .. id
  local tokens, bytes, _, tenant = waiting_entry(id)
  local place, since = unpack(call('HMGET', key, 'place', 'since'))
  if not tokens or not place then  -- Redis has evicted it
    dequeue(id)
    call('HDEL', key, 'due')
    return call('ZREM', P .. 'due', id)
  end
  leave_lane('on_time', tenant, id, tokens)
  enter_lane('late', tenant, id, place, tokens, since)
  call('HSET', P .. 'waiting', id, tokens .. ' ' .. bytes .. ' late ' .. tenant)
  call('HSET', key, 'lane', 'late')
end

local function lane_tokens(lane)  -- prompt tokens of the requests in the lane
  return tonumber(call('HGET', P .. 'lanes', lane) or 0)
end

-- Returns the state of a lane: {requests, prompt tokens, ms since the oldest request was submitted, number of tenants,
-- {tenant, counter, ...}, {queued tokens, ...}, {weight, ...}}.  The lists have the TENANTS_SHOWN tenants with the
-- smallest counters, or only `tenant`.
local function lane_state(lane, tenant)
  local waiting, turns = call('ZCARD', P .. 'turns:' .. lane), P .. 'turns:' .. lane
  if waiting == 0 then return {0, 0, 0, 0, {}, {}, {}} end
  local oldest = call('ZRANGE', P .. 'ages:' .. lane, 0, 0, 'WITHSCORES')[2]
  local age = now_ms() - (oldest or now_ms())  -- no oldest: its key was evicted
  local state = {call('ZCARD', P .. 'ages:' .. lane), lane_tokens(lane), age, waiting, {}, {}, {}}
  local counter = tenant and call('ZSCORE', turns, tenant)
  local shown, names = counter and {tenant, counter} or {}, {}
  if not tenant then shown = call('ZRANGE', turns, 0, TENANTS_SHOWN - 1, 'WITHSCORES') end
  for i = 1, #shown, 2 do names[#names + 1] = shown[i] end
  if #names == 0 then return state end
  state[5], state[6] = shown, call('HMGET', P .. 'queued_tokens:' .. lane, unpack(names))
  state[7] = call('HMGET', P .. 'weights', unpack(names))
  return state
end

local function queue_state(tenant)  -- the states of both lanes
  return {lane_state('on_time', tenant), lane_state('late', tenant)}
end
