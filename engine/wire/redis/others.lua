-- Returns the loads of all engines with a lease but this one.
local me = ARGV[1]

local loads = {}
for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
  if engine ~= me then loads[#loads + 1] = call('GET', P .. 'lease:' .. engine) or nil end
end
return loads
