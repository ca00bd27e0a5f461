-- Store a new response (`new` is 1), or the next state of an unfinished response (0; its `input` stays).
-- `holder`: tenant or API key that may read it.  `previous`: the response that it continues, or ''.  `ended`: 1 if this
-- is its last state.  `ttl`: lifetime in ms.  `most`: maximum bytes of all responses of the holder.
-- `lease`: ms for which the calling gateway runs it in the background; 0: it does not run in the background.
-- Returns the number of older responses removed for it; -1: it is too large; -2: no unfinished response has this id.
local holder, id, new, previous, input, body, ended, ttl, most, lease = unpack(ARGV)
local key, list, sizes = P .. 'response:' .. id, P .. 'responses:' .. holder, P .. 'response_bytes:' .. holder

if new == '0' then
  local known
  known, previous, input = unpack(call('HMGET', key, 'ended', 'previous', 'input'))
  if known ~= '0' then return -2 end
end
for _, old in ipairs(call('ZRANGEBYSCORE', list, '-inf', now_ms())) do forget_response(holder, old) end
local bytes = #input + #body + RESPONSE_BYTES
if bytes > tonumber(most) then return -1 end
local total = (call('HGET', sizes, 'total') or 0) - (call('HGET', sizes, id) or 0) + bytes
local evicted = 0
while total > tonumber(most) do
  local oldest = call('ZRANGE', list, 0, 1)
  local one = oldest[1] ~= id and oldest[1] or oldest[2]
  if not one then break end
  total = total - (call('HGET', sizes, one) or 0)
  forget_response(holder, one)
  evicted = evicted + 1
end
call('HSET', key, 'holder', holder, 'previous', previous, 'input', input, 'body', body, 'ended', ended)
call('HSET', sizes, id, bytes, 'total', total)
keep_response(holder, id, ttl)
if ended == '1' then
  call('ZREM', P .. 'responses_running', id)
elseif lease ~= '0' then
  call('ZADD', P .. 'responses_running', now_ms() + lease, id)
end
return evicted
