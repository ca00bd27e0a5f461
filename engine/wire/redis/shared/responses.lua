-- Stored responses, which clients may retrieve and continue: see "Responses" in KEYS.md.

local function forget_response(holder, id)
  local sizes = P .. 'response_bytes:' .. holder
  local bytes = call('HGET', sizes, id)
  if bytes then
    call('HDEL', sizes, id)
    call('HINCRBY', sizes, 'total', -bytes)
  end
  call('ZREM', P .. 'responses:' .. holder, id)
  call('ZREM', P .. 'responses_running', id)
  call('DEL', P .. 'response:' .. id)
end

local function keep_response(holder, id, ttl)  -- let a response expire `ttl` ms from now
  call('PEXPIRE', P .. 'response:' .. id, ttl)
  call('ZADD', P .. 'responses:' .. holder, now_ms() + ttl, id)
  for _, key in ipairs({P .. 'responses:' .. holder, P .. 'response_bytes:' .. holder}) do
    if call('PTTL', key) < tonumber(ttl) then call('PEXPIRE', key, ttl) end
  end
end
