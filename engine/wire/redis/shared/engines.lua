-- Engines: their free capacity, leases and held requests, and the cleanup after they end.  "Suspects" in KEYS.md.

-- Sum the free capacity of all engines anew, because Redis has lost that of one engine: its key expired or was evicted.
-- `tokens`: free capacity of `engine`, which is not stored yet.
local function recount_offers(engine, tokens)
  for _, other in ipairs(call('ZRANGE', P .. 'offers', 0, -1)) do
    if other ~= engine then tokens = tokens + (call('HGET', P .. 'engine:' .. other, 'room') or 0) end
  end
  call('SET', P .. 'offered', string.format('%.0f', tokens))
end

-- Record the free capacity of an engine: `tokens` prompt tokens, valid until `ends`, unix ms.  `before`: its free
-- capacity at its last sync, as text; nil: unknown.  Updates the sum over all engines, so that a submit need not visit
-- every engine.
local function offer(engine, tokens, ends, before)
  if before == '0' and tokens == 0 then return end
  local counted
  if tokens > 0 then
    counted = call('ZADD', P .. 'offers', ends, engine) == 0
  else
    counted = call('ZREM', P .. 'offers', engine) == 1
  end
  if counted then
    before = before or call('HGET', P .. 'engine:' .. engine, 'room')
    if not before then return recount_offers(engine, tokens) end
    tokens = tokens - before
  end
  if tokens ~= 0 then call('INCRBY', P .. 'offered', string.format('%.0f', tokens)) end
end

local function free_capacity(me)  -- returns the prompt tokens that all engines, except `me`, would still claim
  for _, engine in ipairs(call('ZRANGEBYSCORE', P .. 'offers', '-inf', now_ms() - 1)) do offer(engine, 0) end
  local tokens = tonumber(call('GET', P .. 'offered') or 0)
  if me and call('ZSCORE', P .. 'offers', me) then
    tokens = tokens - (call('HGET', P .. 'engine:' .. me, 'room') or 0)
  end
  return tokens
end

-- Returns the free capacity, in prompt tokens, of engines except `me` that claim requests now.  An engine that has
-- claimed enough prompts for its next steps has free capacity, too, but claims nothing.
local function capacity_elsewhere(me)
  local tokens = free_capacity(me)
  if tokens == 0 then return 0 end
  for _, engine in ipairs(call('ZREVRANGEBYSCORE', P .. 'offers', '+inf', '-inf', 'LIMIT', '0', WAKE_TRIES)) do
    local left, claims = unpack(call('HMGET', P .. 'engine:' .. engine, 'room', 'claims'))
    if engine ~= me and claims == '0' then tokens = tokens - left end
  end
  return tokens
end

-- Renew the engine's lease, whose value is version, unix ms, load.  One counter numbers the versions of all leases, so
-- that a reading of the fleet returns only the leases with a higher version than at the previous reading.
local function renew_lease(engine, load, lease_ms)
  local value = struct.pack('>dd', call('INCR', P .. 'changes'), now_ms()) .. load
  call('SET', P .. 'lease:' .. engine, value, 'PX', lease_ms)
end

-- Wake the RINGS engines with the most free capacity, if it is enough for a request of `tokens` prompt tokens.  An
-- engine is not woken again before its next sync, which sees all waiting requests.  If an engine's process does not
-- listen, another engine is woken.  Returns the number of engines woken.  "Wake-ups" in KEYS.md.
local function wake_engines(tokens)
  local tried, woken = {}, 0
  for _, engine in ipairs(call('ZREVRANGEBYSCORE', P .. 'bells', '+inf', tokens, 'LIMIT', '0', WAKE_TRIES)) do
    tried[#tried + 1] = engine
    if call('PUBLISH', P .. 'bell:' .. engine, '') > 0 then woken = woken + 1 end
    if woken == RINGS then break end
  end
  if #tried > 0 then call('ZREM', P .. 'bells', unpack(tried)) end
  return woken
end

-- Wake an engine that can free enough for a request of the tenant, of `tokens` prompt tokens, by preempting other
-- tenants' sequences.  Full engines, which have scores below 0, go first.
local function wake_to_preempt(tenant, tokens)
  local bells, below = P .. 'bells', '(' .. tokens
  for _, engine in ipairs(call('ZRANGEBYSCORE', bells, '-inf', below, 'LIMIT', '0', WAKE_TRIES)) do
    local lease = call('GET', P .. 'lease:' .. engine)
    local load = lease and cmsgpack.unpack(string.sub(lease, LEASE_HEAD + 1)) or {}
    local yields = (load[LOAD_PREEMPTIBLE_OF] or {})[tenant] or load[LOAD_PREEMPTIBLE] or 0
    for _, over in ipairs(load[LOAD_CROWD] or {}) do
      if over == tenant then yields = 0 end
    end
    if yields >= tonumber(tokens) then
      call('ZREM', bells, engine)
      if call('PUBLISH', P .. 'bell:' .. engine, '') > 0 then return end
    end
  end
end

local function hold(engine, id, place, tenant, tokens)  -- record that the engine holds the request; charge its tenant
  call('ZADD', P .. 'held:' .. engine, place, id)
  call('HSET', P .. 'req:' .. id, 'engine', engine)
  charge(tenant, tokens)
end

local function let_go(engine, id)  -- take the request from the engine, refund its tenant; returns whether it is alive
  local key = P .. 'req:' .. id
  call('ZREM', P .. 'held:' .. engine, id)
  if not alive(id) then return false end
  call('HDEL', key, 'engine')
  call('HSET', key, 'from', engine)
  charge(call('HGET', key, 'tenant'), -call('HGET', key, 'tokens'))
  return true
end

local function condemn(id, engine)  -- move a request to the quarantine, and end it with an error
  local payload, attempts, at = unpack(call('HMGET', P .. 'req:' .. id, 'payload', 'attempts', 'said'))
  local key, now = P .. 'quarantine:' .. id, now_ms()
  call('HSET', key, 'payload', payload, 'attempts', attempts, 'said', at, 'engine', engine, 'at', now)
  call('PEXPIRE', key, QUARANTINED_MS)
  call('ZADD', P .. 'quarantine', now, id)
  call('PEXPIRE', P .. 'quarantine', QUARANTINED_MS)
  while call('ZCARD', P .. 'quarantine') > QUARANTINE do
    call('DEL', P .. 'quarantine:' .. call('ZPOPMIN', P .. 'quarantine')[1])
  end
  end_with(id, {'error', -1, 'the engine died ' .. attempts .. ' times at this request, which is now in quarantine'})
end

local function accuse(engine, ids)  -- count a failed attempt for each request that a dead engine held
  local trial = call('HGET', P .. 'engine:' .. engine, 'trial')
  local stuck = {}
  for _, id in ipairs(ids) do
    local key, now = P .. 'req:' .. id, logged_tokens(id)
    local attempts, before = unpack(call('HMGET', key, 'attempts', 'said'))
    attempts = tonumber(before or -1) == now and attempts + 1 or 1
    call('HSET', key, 'attempts', attempts, 'said', now)
    if attempts >= MAX_ATTEMPTS then
      stuck[#stuck + 1] = id
      if id == trial then stuck = {id} break end
    end
  end
  if #stuck == 1 then
    condemn(stuck[1], engine)
  else
    for _, id in ipairs(stuck) do call('ZADD', P .. 'suspects', call('HGET', P .. 'req:' .. id, 'place'), id) end
  end
end

-- Return all requests that the engine holds to their places in the queue.  `died`: the engine ended without closing.
local function give_back(engine, died)
  flush_tail(engine)
  local ids, held = {}, call('ZRANGE', P .. 'held:' .. engine, 0, -1)
  call('DEL', P .. 'held:' .. engine, P .. 'lease:' .. engine, P .. 'prefixes:' .. engine)
  call('HDEL', P .. 'spare', engine)
  offer(engine, 0)
  call('ZREM', P .. 'engines', engine)
  call('ZREM', P .. 'bells', engine)
  for _, id in ipairs(held) do
    if let_go(engine, id) then ids[#ids + 1] = id end
  end
  if died then accuse(engine, ids) end
  call('HDEL', P .. 'engine:' .. engine, 'trial')
  for _, id in ipairs(ids) do
    if alive(id) and not call('ZSCORE', P .. 'suspects', id) then enqueue(id) end
  end
  if #ids > 0 then wake_engines('1') end
end
