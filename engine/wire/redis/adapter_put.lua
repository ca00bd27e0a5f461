-- Store a LoRA adapter under a name, for all gateways.
-- `value`: the encoded adapter.  `replace`: 1 to replace any other value.  `most`: maximum number of names.
-- `expected`: a value that may be replaced, '' for none.
-- Returns 1: stored, now or by an earlier attempt; 0: the name has another value; -1: `most` names are in use.
local name, value, replace, most, expected = unpack(ARGV)
local known = call('HGET', P .. 'adapters', name)

if known == value then return 1 end
if known and replace == '0' and known ~= expected then return 0 end
if not known and call('HLEN', P .. 'adapters') >= tonumber(most) then return -1 end
call('HSET', P .. 'adapters', name, value)
return 1
