-- A new gateway process opens under this name.  The clients of an earlier process have lost their connections, so its
-- requests wait `grace` ms for a gateway to attach.
local gateway, grace = unpack(ARGV)

for _, id in ipairs(call('SMEMBERS', P .. 'open:' .. gateway)) do
  unlisten(id, gateway, grace)
end
