-- Read the LoRA adapter with this name, or all adapters if it is ''.  Returns {name, value, ...}; {} if there is none.
local name = ARGV[1]

if name == '' then return call('HGETALL', P .. 'adapters') end
local value = call('HGET', P .. 'adapters', name)
return value and {name, value} or {}
