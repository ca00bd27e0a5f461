-- Queue the prompts of one client's request: all of them or none.
-- Then for each prompt: id, payload, prompt tokens, continuations.
-- `excess`: most tokens queued beyond the engines' room; '' for any number.  `once`, `body`: idempotency key and digest
-- of the body; '' for none.  `name`: of the request in the promises.
-- Returns {1 if queued, requests waiting, room in tokens, tenant queues, {id, body} of the request that `once` found}.
local gateway, tenant, weight, priority, deadline, excess = unpack(ARGV, 1, 6)
local retain, once, body, record, name, first_id = unpack(ARGV, 7, 12)
local FIRST = 12  -- of the prompts, in ARGV

local free, duplicate, asked = room(), {}, 0
for i = FIRST, #ARGV, 4 do asked = asked + ARGV[i + 2] end

local function has_room()
  local tokens = asked
  for _, queued in ipairs(call('HVALS', P .. 'queued_tokens')) do tokens = tokens + queued end
  return excess == '' or tokens <= free + excess
end

local function store(i)  -- the request and the log of the prompt at ARGV[i]
  local id, payload, size, n = unpack(ARGV, i, i + 3)
  local key, log = P .. 'req:' .. id, P .. 'log:' .. id
  call('HSET', key, 'payload', payload, 'tokens', size, 'tenant', tenant, 'deadline', deadline,
       'place', priority * PLACES + call('INCR', P .. 'arrivals'), 'listeners', gateway,
       'since', now_ms())
  call('PEXPIREAT', key, deadline + EXPIRY_MS)
  call('HSET', log, 'n', n, 'retain', retain)
  if i == FIRST then
    call('HSET', log, 'record', record)
    if once ~= '' then call('HSET', log, 'once', once) end
  end
  call('PEXPIREAT', log, deadline + EXPIRY_MS)
  call('SADD', P .. 'open:' .. gateway, id)
  call('HSET', P .. 'weights', tenant, weight)
  call('HINCRBY', P .. 'usage:' .. tenant, 'requests', 1)
  call('HINCRBY', P .. 'usage:' .. tenant, 'prompt_tokens', size)
  enqueue(id)
end

local accepted = call('EXISTS', P .. 'req:' .. first_id) == 1  -- a retry: only the reply did not arrive
if not accepted then
  if once ~= '' then duplicate = call('HMGET', P .. 'once:' .. once, 'id', 'body') end
  if not duplicate[1] then accepted = has_room() end
  if accepted then
    for i = FIRST, #ARGV, 4 do store(i) end
    if call('ZREM', P .. 'promises', name) == 0 then count_first_visit(asked) end
    call('HDEL', P .. 'parts', name)
    if once ~= '' then
      call('HSET', P .. 'once:' .. once, 'id', first_id, 'body', body)
      call('PEXPIREAT', P .. 'once:' .. once, deadline + EXPIRY_MS)
    end
    call('PUBLISH', P .. 'bell', '')
  end
end
return {accepted and 1 or 0, call('HLEN', P .. 'waiting'), free, tenant_queues(), duplicate}
