-- Let a name stand for a LoRA adapter in all gateways.
-- `value`: what the name stands for.  `replace`: 1 to replace another value.  `most`: names at most.
-- Returns 1: stored, or stored before by a retry; 0: the name stands for something else; -1: `most` names are in use.
local name, value, replace, most = unpack(ARGV)
local known = call('HGET', P .. 'adapters', name)

if known == value then return 1 end
if known and replace == '0' then return 0 end
if not known and call('HLEN', P .. 'adapters') >= tonumber(most) then return -1 end
call('HSET', P .. 'adapters', name, value)
return 1
