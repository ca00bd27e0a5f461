-- Read the fleet; remove dead gateways and engines on the way.
-- `grace`: ms before requests of dead gateways are withdrawn.  `beat`: number of this heartbeat.
-- Returns {
--   loads, Redis' unix ms, room in tokens, queue state, 1 if the last heartbeat is known, requests in quarantine,
--   unix ms of each engine's last exchange
-- }.
local gateway, grace, beat = unpack(ARGV)

local function register_heartbeat()  -- returns 1 if Redis remembers the last heartbeat, else 0
  local key = P .. 'gateway:' .. gateway
  local before = call('GET', key)
  call('DEL', key)  -- a first write that full memory never refuses
  call('SET', key, beat, 'PX', GATEWAY_MS)
  call('SADD', P .. 'gateways', gateway)
  return before and (before == beat or before + 1 == beat + 0) and 1 or 0
end

local function lapses_count()  -- false for a while after Redis was away: then a lapse says nothing about the engine
  local reached, now = call('GET', P .. 'reached'), now_ms()
  if reached and now - reached > AWAY_MS then call('SET', P .. 'amnesty', 1, 'PX', AMNESTY_MS) end
  call('SET', P .. 'reached', now)
  return call('EXISTS', P .. 'amnesty') == 0
end

local function remove_dead_gateways()
  for _, name in ipairs(call('SMEMBERS', P .. 'gateways')) do
    if call('EXISTS', P .. 'gateway:' .. name) == 0 then
      call('SREM', P .. 'gateways', name)
      for _, id in ipairs(call('SMEMBERS', P .. 'open:' .. name)) do
        unlisten(id, name, grace)
      end
      call('DEL', P .. 'open:' .. name)
    end
  end
end

local function remove_dead_engines(died)
  for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
    if call('EXISTS', P .. 'lease:' .. engine) == 0 then
      give_back(engine, died)
      call('HINCRBY', P .. 'engine:' .. engine, 'epoch', 1)
      call('PEXPIRE', P .. 'engine:' .. engine, MEMORY_MS)
    end
  end
end

local function move_overdue()  -- what has waited past its due time cannot start in time any more
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'due', '-inf', now_ms(), 'LIMIT', 0, MOVES)) do move_to_late(id) end
end

local known = register_heartbeat()
remove_dead_gateways()
for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'orphans', '-inf', now_ms())) do withdraw(id) end
remove_dead_engines(lapses_count())
move_overdue()
sweep_prefixes()
for _, lane in ipairs(LANES) do head(lane) end  -- ends requests past their deadline
first_suspect()
local loads, heard = {}, {}
for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
  loads[#loads + 1] = call('GET', P .. 'lease:' .. engine)
  heard[#heard + 1] = call('HGET', P .. 'engine:' .. engine, 'heard') or '0'
end
return {loads, now_ms(), free_room(), queue_state(), known, call('ZCARD', P .. 'quarantine'), heard}
