-- Remove a name from the list of LoRA adapters.  Returns whether it was there: 1 or 0.
local name = ARGV[1]

return call('HDEL', P .. 'adapters', name)
