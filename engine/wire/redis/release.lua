-- Free an idempotency key, if it still belongs to this request.
local once, id = unpack(ARGV)

local key = P .. 'once:' .. once
if call('HGET', key, 'id') == id then call('DEL', key) end
