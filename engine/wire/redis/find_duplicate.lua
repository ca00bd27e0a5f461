-- Returns {id, body digest} of the first request with an idempotency key, or {false, false}.
local once = ARGV[1]

return call('HMGET', P .. 'once:' .. once, 'id', 'body')
