-- Run by a gateway process that opens.  The clients of an earlier process of its name have lost their connections, so
-- the requests of that process wait `grace` ms for a gateway to attach.
local gateway, grace = unpack(ARGV)

for _, id in ipairs(call('SMEMBERS', P .. 'open:' .. gateway)) do
  unlisten(id, gateway, grace)
end
