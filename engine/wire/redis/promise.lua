-- Promise a refused request a time to return: "Promises" in KEYS.md.
-- `broken`: '1' for a new promise to a request that returned on time and still cannot be queued.  Retry terms: `pace`
-- and `full_pace` in prompt tokens a second, `least` and `most` in ms, and the least shares of the pace.
-- Returns ms until the promised time; 0: it is now; -1: the time would be later than `most`.
local name, tenant, weight, tokens, broken = unpack(ARGV, 1, 5)
local pace, full_pace, least, most, next_share, last_share = unpack(ARGV, 6)
local now = now_ms()

local function drop_missed_promises()  -- what they took of their tenants' time is promised to others
  for _, missed in ipairs(call('ZRANGEBYSCORE', P .. 'promises', '-inf', now - PROMISE_MS)) do
    local ms, owner = string.match(call('HGET', P .. 'parts', missed) or '0 ', '^(%d+) (.*)$')
    local till = call('HGET', P .. 'promised', owner)
    if till then call('HSET', P .. 'promised', owner, string.format('%.0f', till - ms)) end
    call('ZREM', P .. 'promises', missed)
    call('HDEL', P .. 'parts', missed)
  end
end

local function first_visits()  -- tokens a second of requests that arrive for the first time, without the outliers
  local seconds, mean = {}, 0
  for i = 1, CAME_S do seconds[i] = tonumber(call('GET', P .. 'came:' .. (math.floor(now / 1000) - i)) or 0) end
  table.sort(seconds)
  for i = 1 + CAME_OUTLIERS, CAME_S - CAME_OUTLIERS do
    mean = mean + seconds[i] / (CAME_S - 2 * CAME_OUTLIERS)
  end
  return mean
end

drop_missed_promises()
local due = call('ZSCORE', P .. 'promises', name)
if due then
  if due - now > PUNCTUAL_MS then return due - now end
  if broken == '0' then return 0 end
  call('ZREM', P .. 'promises', name)
else
  count_first_visit(tokens)
end
local start, others = now + least, 0  -- others: the weights of all other tenants with promises
local promised = call('HGETALL', P .. 'promised')
for i = 1, #promised, 2 do
  local till = tonumber(promised[i + 1])
  if promised[i] == tenant then start = math.max(start, till)
  elseif till > now then others = others + (call('HGET', P .. 'weights', promised[i]) or 1)
  else call('HDEL', P .. 'promised', promised[i]) end
end
if start - now > most + 0 then return -1 end
local least_share = next_share + (last_share - next_share) * (start - now) / most
local share = math.max(1 - first_visits() / full_pace, least_share)
share = share * weight / (weight + others)
local pause = math.ceil((start - now) / 1000) * 1000  -- Retry-After knows whole seconds
call('HSET', P .. 'weights', tenant, weight)
call('ZADD', P .. 'promises', now + pause, name)
local till = math.min(start + 1000 * tokens / (pace * share), now + 2 * most)
call('HSET', P .. 'promised', tenant, string.format('%.0f', till))
call('HSET', P .. 'parts', name, string.format('%.0f', till - start) .. ' ' .. tenant)
call('PEXPIRE', P .. 'promises', 2 * most + PROMISE_MS)
call('PEXPIRE', P .. 'parts', 2 * most + PROMISE_MS)
call('PEXPIRE', P .. 'promised', 2 * most + PROMISE_MS)
return pause
