-- Read the versions in Redis; the first process of a namespace writes its own.
-- Returns {version of the Redis layout, version of the wire messages}.
local layout_version, wire_version = unpack(ARGV)
local key = P .. 'layout'

local known = call('HMGET', key, 'redis', 'wire')
if known[1] and known[2] then return known end
call('DEL', key)  -- deletes first: Redis runs that even when its memory is full
call('HSET', key, 'redis', layout_version, 'wire', wire_version)
return {layout_version, wire_version}
