-- Returns the loads of all other engines with a lease.
local me = ARGV[1]

local loads = {}
for _, engine in ipairs(call('ZRANGE', P .. 'engines', 0, -1)) do
  local lease = engine ~= me and call('GET', P .. 'lease:' .. engine)
  if lease then loads[#loads + 1] = string.sub(lease, 17) end
end
return loads
