-- Run by an engine whose sync was refused: decides which of its requests it may continue.  "The token log" in KEYS.md.
-- `seq`: sequence number of its last sync.  Then the ids of the requests that it holds.  Returns {epoch, {{id, gateways
-- that listen, {tokens in the log of each choice}} for each request that it keeps}}.
local engine, session, seq, lease_ms, load = unpack(ARGV, 1, 5)
local FIRST = 6  -- first id in ARGV
local state = P .. 'engine:' .. engine

local function take_back(id)  -- claim a request again that has returned to the queue, if no other engine has held it
  if alive(id) and not call('ZSCORE', P .. 'held:' .. engine, id)
     and call('HGET', P .. 'req:' .. id, 'from') == engine and dequeue(id) then
    local place, tenant, size, dropped = unpack(
      call('HMGET', P .. 'req:' .. id, 'place', 'tenant', 'tokens', 'dropped'))
    hold(engine, id, place, tenant, size)
    for index in string.gmatch(dropped or '', '%d+') do order(engine, id .. ' ' .. index) end
  end
end

local function log_lengths(id)
  local lengths = {}
  for index = 0, choice_count(id) - 1 do
    lengths[index + 1] = call('STRLEN', P .. 'log:' .. id .. ':' .. index) / 4
  end
  return lengths
end

if (call('HGET', state, 'session') or session) ~= session then return redis.error_reply('SUPERSEDED') end
call('HDEL', state, 'reply')  -- deletes first: Redis runs that even when its memory is full
flush_tail(engine)
local held, kept = {}, {}
for i = FIRST, #ARGV do
  local id = ARGV[i]
  take_back(id)
  if call('ZSCORE', P .. 'held:' .. engine, id) then
    kept[id] = true
    held[#held + 1] = {id, listeners(id), log_lengths(id)}
  end
end
local returned = false
for _, id in ipairs(call('ZRANGE', P .. 'held:' .. engine, 0, -1)) do
  if not kept[id] and let_go(engine, id) then
    enqueue(id)
    returned = true
  end
end
if returned then wake_engines('1') end
call('HSET', state, 'session', session, 'seq', seq)
call('PEXPIRE', state, MEMORY_MS)
call('ZADD', P .. 'engines', 0, engine)
renew_lease(engine, load, lease_ms)
return {call('HGET', state, 'epoch') or '0', held}
