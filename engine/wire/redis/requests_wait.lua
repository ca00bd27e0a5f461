-- Returns 1 if requests wait while no serving engine has free capacity, else 0.
local waiting = call('HLEN', P .. 'waiting') + call('ZCARD', P .. 'suspects')
return waiting > 0 and free_capacity() == 0 and 1 or 0
