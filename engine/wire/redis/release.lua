-- Free an idempotency key, if this request is still the first under it.
local once, id = unpack(ARGV)

local key = P .. 'once:' .. once
if call('HGET', key, 'id') == id then call('DEL', key) end
