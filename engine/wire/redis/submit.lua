-- Queue the prompts of one client's request in one lane: all of them or none.
-- ARGV: the values below, then for each prompt: id, payload, prompt tokens, choices, digests of its prefixes.
-- `once`, `body`: idempotency key and digest of the body; '' for none.  `on_time_excess`, `late_excess`: maximum prompt
-- tokens, this request's included, by which the on-time lane, or both lanes, may exceed the engines' free capacity.
-- `target`: ms after which the request moves to the late lane.  `max_requests`, `max_bytes`: maximum waiting
-- requests, and maximum bytes of their payloads.
-- `size_class`: the request's size class, see "Order" in KEYS.md.  `extra`: tokens that each prompt counts for in
-- addition to its own.
-- Returns {lane or 'refused', 'full' or 'known', number of requests ahead, free capacity in prompt tokens, queue state
-- with only this tenant, {id, body} of an earlier request with the same key}.
local gateway, tenant, weight, priority, deadline, retain = unpack(ARGV, 1, 6)
local once, body, record, first_id = unpack(ARGV, 7, 10)
local on_time_excess, late_excess, target, max_requests, max_bytes, size_class, extra = unpack(ARGV, 11, 17)
local FIRST = 18  -- first prompt in ARGV

local free, duplicate, prompt_tokens, bytes, shortest = free_capacity(), {}, 0, 0, nil
for i = FIRST, #ARGV, 5 do
  prompt_tokens, bytes = prompt_tokens + ARGV[i + 2], bytes + #ARGV[i + 1]
  shortest = math.min(shortest or PLACES, ARGV[i + 2])
end
local asked = prompt_tokens + extra * (#ARGV - FIRST + 1) / 5

local function is_full()
  local requests = call('HLEN', P .. 'waiting') + (#ARGV - FIRST + 1) / 5
  return requests > tonumber(max_requests) or bytes + (call('GET', P .. 'queued_bytes') or 0) > tonumber(max_bytes)
end

local function choose_lane()  -- returns the lane with free capacity for these prompts; nil: neither lane has
  local on_time = asked + lane_tokens('on_time')
  if on_time - on_time_behind(tenant, priority, size_class) <= free + on_time_excess then return 'on_time' end
  if on_time + lane_tokens('late') <= free + late_excess then return 'late' end
end

local function count_usage()  -- one update for all prompts, since a request may have a thousand prompts
  call('HSET', P .. 'weights', tenant, weight)
  call('HINCRBY', P .. 'usage:' .. tenant, 'requests', (#ARGV - FIRST + 1) / 5)
  call('HINCRBY', P .. 'usage:' .. tenant, 'prompt_tokens', prompt_tokens)
end

local function store(i, lane, now)  -- create the request and the log of the prompt at ARGV[i]
  local id, payload, size, n, prefixes = unpack(ARGV, i, i + 4)
  local key, log = P .. 'req:' .. id, P .. 'log:' .. id
  call('HSET', key, 'payload', payload, 'tokens', size + extra, 'tenant', tenant, 'deadline', deadline,
       'place', priority * PLACES + call('INCR', P .. 'arrivals'), 'listeners', gateway,
       'since', now, 'lane', lane, 'due', now + target, 'size_class', size_class)
  if prefixes ~= '' then call('HSET', key, 'prefixes', prefixes) end
  call('PEXPIREAT', key, deadline + EXPIRY_MS)
  call('HSET', log, 'n', n, 'retain', retain)
  if i == FIRST then
    call('HSET', log, 'record', record)
    if once ~= '' then call('HSET', log, 'once', once) end
  end
  call('PEXPIREAT', log, deadline + EXPIRY_MS)
  call('SADD', P .. 'open:' .. gateway, id)
  enqueue(id)
end

local ahead = call('HLEN', P .. 'waiting')
local outcome = call('HGET', P .. 'req:' .. first_id, 'lane')  -- set if this is a retry whose first reply was lost
if not outcome and call('EXISTS', P .. 'req:' .. first_id) == 1 then outcome = 'on_time' end  -- it has ended
if not outcome then
  if once ~= '' then duplicate = call('HMGET', P .. 'once:' .. once, 'id', 'body') end
  local lane = not duplicate[1] and choose_lane()
  outcome = duplicate[1] and 'known' or not lane and 'refused' or is_full() and 'full' or lane
  if outcome == lane then
    if lane == 'on_time' then ahead = call('ZCARD', P .. 'ages:on_time') end
    count_usage()
    local now = now_ms()
    for i = FIRST, #ARGV, 5 do store(i, lane, now) end
    if once ~= '' then
      call('HSET', P .. 'once:' .. once, 'id', first_id, 'body', body)
      call('PEXPIREAT', P .. 'once:' .. once, deadline + EXPIRY_MS)
    end
    if wake_engines(shortest + extra) == 0 then wake_to_preempt(tenant, shortest + extra) end
  end
end
return {outcome, ahead, free, queue_state(tenant), duplicate}
