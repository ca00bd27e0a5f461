-- The queue: tenants in the order of their counters, and within a tenant requests in the order of their places.

local function charge(tenant, tokens)  -- add tokens / weight to the tenant's counter; a negative number refunds
  local counter = call('HINCRBYFLOAT', P .. 'counters', tenant, tokens / (call('HGET', P .. 'weights', tenant) or 1))
  call('ZADD', P .. 'turns', 'XX', counter, tenant)
end

local function count_first_visit(tokens)  -- count the prompt tokens of a request that arrives for the first time
  local key = P .. 'came:' .. math.floor(now_ms() / 1000)
  call('INCRBY', key, tokens)
  call('PEXPIRE', key, CAME_MS)
end

local function enqueue(id)
  local tokens, place, tenant, since = unpack(
    call('HMGET', P .. 'req:' .. id, 'tokens', 'place', 'tenant', 'since'))
  if not call('ZSCORE', P .. 'turns', tenant) then  -- lift its counter: a tenant saves nothing up while it is idle
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

local function dequeue(id)  -- remove the request from the queue or the suspects; returns whether it waited there
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

-- Tenants with a queue: {{tenant, counter, ...}, {queued tokens, ...}, {weight, ...}}, smallest counter first.
local function tenant_queues()
  local tenants, names = call('ZRANGE', P .. 'turns', 0, -1, 'WITHSCORES'), {}
  for i = 1, #tenants, 2 do names[#names + 1] = tenants[i] end
  if #names == 0 then return {tenants, names, names} end
  return {tenants, call('HMGET', P .. 'queued_tokens', unpack(names)), call('HMGET', P .. 'weights', unpack(names))}
end
