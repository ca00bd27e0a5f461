-- Shared beginning of all scripts: the key prefix, the clock, and orders to an engine.
--
-- Redis converts each number among a command's arguments to text, which takes as long as a cheap command.  So scripts
-- with many commands pass constants as text: '0'.
--
-- KEYS[1] is the prefix; every other key is made from it.  When its memory is full, Redis refuses a script whose first
-- write takes memory, and no script that begins with a delete.  So submit and attach are refused before they change
-- anything.  The other scripts, which free memory in the end, always run.

local P = KEYS[1]
local call = redis.call

local NOW  -- what now_ms has read

local function now_ms()  -- unix time on Redis' clock, the same in all of a script
  if not NOW then
    local time = call('TIME')
    NOW = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return NOW
end

local function alive(id)  -- whether the request has not ended
  return call('HEXISTS', P .. 'req:' .. id, 'payload') == 1
end

local function order(engine, text)  -- queue an order for the engine: see orders:ENGINE in KEYS.md
  local key = P .. 'orders:' .. engine
  call('RPUSH', key, text)
  call('PEXPIRE', key, MEMORY_MS)
  call('PUBLISH', P .. 'bell:' .. engine, '')
end
