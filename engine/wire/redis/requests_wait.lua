-- Returns 1 if a request waits that the serving engines have no free capacity for, else 0.
local waiting = call('HLEN', P .. 'waiting') + call('ZCARD', P .. 'suspects')
return waiting > 0 and free_room() == 0 and 1 or 0
