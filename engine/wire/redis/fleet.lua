-- Read the changed leases of one page of the engines, and the queue.  Remove dead gateways and engines.
-- `grace`: ms before requests of dead gateways are withdrawn.  `beat`: sequence number of this heartbeat.  `after`:
-- name of the engine before the page; '': the first page.  `since`: highest lease version that this gateway has read of
-- this page; 0: none.  If Redis does not have the gateway's last heartbeat, it may have lost data that the gateway has
-- read, so it returns the first page with all leases.  Returns {
--   changed leases of the page, Redis' unix ms, free capacity in prompt tokens, queue state, 1 if Redis had the last
--   heartbeat, number of quarantined requests, name of the page's last engine ('': it is the last page), number of
--   engines in the page, highest lease version }.
local gateway, grace, beat, after, since = unpack(ARGV)

local function register_heartbeat()  -- returns 1 if Redis has the gateway's last heartbeat, else 0
  local key = P .. 'gateway:' .. gateway
  local before = call('GET', key)
  call('DEL', key)  -- deletes first: Redis runs that even when its memory is full
  call('SET', key, beat, 'PX', GATEWAY_MS)
  call('SADD', P .. 'gateways', gateway)
  return before and (before == beat or before + 1 == beat + 0) and 1 or 0
end

-- Redis' clock may be set back, by hours.  Shorten the times that would then last until the clock has caught up: leases
-- of engines, heartbeats of gateways, and the time for which requests without a listener wait.
local function follow_clock(reached)
  local back = reached - now_ms()
  if back <= AWAY_MS then return end
  local keys = {}
  for _, engine in ipairs(call('ZRANGE', P .. 'engines', 0, -1)) do keys[#keys + 1] = P .. 'lease:' .. engine end
  for _, name in ipairs(call('SMEMBERS', P .. 'gateways')) do keys[#keys + 1] = P .. 'gateway:' .. name end
  for _, key in ipairs(keys) do
    local left = call('PTTL', key)
    if left > back then call('PEXPIRE', key, left - back) end
  end
  local orphans = call('ZRANGE', P .. 'orphans', 0, -1, 'WITHSCORES')
  for i = 1, #orphans, 2 do call('ZADD', P .. 'orphans', string.format('%.0f', orphans[i + 1] - back), orphans[i]) end
end

-- Returns whether a lapsed lease means a dead engine: not for AMNESTY_MS after Redis was away.
local function lapses_count(reached)
  local now = now_ms()
  if now - reached > AWAY_MS then call('SET', P .. 'amnesty', 1, 'PX', AMNESTY_MS) end
  call('SET', P .. 'reached', now)
  return call('EXISTS', P .. 'amnesty') == 0
end

local function remove_dead_gateways()
  local names, keys = call('SMEMBERS', P .. 'gateways'), {}
  for i, name in ipairs(names) do keys[i] = P .. 'gateway:' .. name end
  if #keys <= COMMAND_WORDS and call('EXISTS', unpack(keys)) == #keys then return end
  for _, name in ipairs(names) do
    if call('EXISTS', P .. 'gateway:' .. name) == 0 then
      call('SREM', P .. 'gateways', name)
      for _, id in ipairs(call('SMEMBERS', P .. 'open:' .. name)) do
        unlisten(id, name, grace)
      end
      call('DEL', P .. 'open:' .. name)
    end
  end
end

local function remove_dead_engine(engine, died)
  give_back(engine, died)
  call('HINCRBY', P .. 'engine:' .. engine, 'epoch', 1)
  call('PEXPIRE', P .. 'engine:' .. engine, MEMORY_MS)
end

-- Read one page of the engines, in the order of their names, and remove engines without a lease.  `died`: whether a
-- lapse counts as a death.  Returns the leases whose version is larger than `since`, the name after which the next page
-- begins, and the number of engines left in the page.
local function read_page(died)
  local first = after == '' and '-' or '(' .. after
  local names, keys = call('ZRANGEBYLEX', P .. 'engines', first, '+', 'LIMIT', 0, READING_ENGINES + 1), {}
  local following = ''
  if #names > READING_ENGINES then
    names[#names] = nil
    following = names[#names]
  end
  for i, engine in ipairs(names) do keys[i] = P .. 'lease:' .. engine end
  local leases, changed, live = #keys > 0 and call('MGET', unpack(keys)) or {}, {}, 0
  for i, lease in ipairs(leases) do
    if not lease then
      remove_dead_engine(names[i], died)
    else
      live = live + 1
      if struct.unpack('>d', lease) > since then changed[#changed + 1] = lease end
    end
  end
  return changed, following, live
end

local function move_overdue()  -- move requests past their due time to the late lane
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'due', '-inf', now_ms(), 'LIMIT', 0, MOVES)) do move_to_late(id) end
end

local known = register_heartbeat()
if known == 0 then after, since = '', 0 else since = tonumber(since) end
local reached = call('GET', P .. 'reached') or now_ms()  -- unix ms of the last reading
follow_clock(reached)
remove_dead_gateways()
for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'orphans', '-inf', now_ms())) do withdraw(id) end
local changed, following, live = read_page(lapses_count(reached))
move_overdue()
sweep_prefixes()
check_quotas()
for _, lane in ipairs(LANES) do head(lane) end  -- ends requests past their deadline
first_suspect()
return {changed, now_ms(), free_capacity(), queue_state(), known, call('ZCARD', P .. 'quarantine'), following, live,
        tonumber(call('GET', P .. 'changes') or 0)}
