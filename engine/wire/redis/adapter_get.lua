-- Read the LoRA adapter of a name; '': of all names.  Returns {name, value, ...}; empty for an unknown name.
local name = ARGV[1]

if name == '' then return call('HGETALL', P .. 'adapters') end
local value = call('HGET', P .. 'adapters', name)
return value and {name, value} or {}
