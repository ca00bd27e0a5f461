-- Remove a name from the list of LoRA adapters.  Returns 1 if the name was in the list, else 0.
local name = ARGV[1]

return call('HDEL', P .. 'adapters', name)
