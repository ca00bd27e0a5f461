-- Definitions that all scripts use: the key prefix, the clock, and control messages to an engine.
--
-- Redis converts each number among a command's arguments to text, which takes as long as a cheap command.  So scripts
-- with many commands pass constants as text: '0'.
--
-- KEYS[1] is the prefix of all keys.  When Redis' memory is full, it refuses a script whose first write takes memory,
-- but not a script whose first write is a delete.  So submit and attach are refused before they change anything.  The
-- other scripts free more memory than they take and begin with a delete, so they run even when memory is full.

local P = KEYS[1]
local call = redis.call

local NOW  -- cached result of now_ms

local function now_ms()  -- unix time in ms on Redis' clock, constant within a script
  if not NOW then
    local time = call('TIME')
    NOW = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return NOW
end

local function alive(id)  -- returns whether the request has not ended
  return call('HEXISTS', P .. 'req:' .. id, 'payload') == 1
end

local function order(engine, text)  -- queue a control message for the engine and wake it, see orders:ENGINE in KEYS.md
  local key = P .. 'orders:' .. engine
  call('RPUSH', key, text)
  call('PEXPIRE', key, MEMORY_MS)
  call('PUBLISH', P .. 'bell:' .. engine, '')
end
