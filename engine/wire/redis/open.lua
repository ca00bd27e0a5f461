-- A new engine process opens under this name.  It holds nothing of what an earlier process held.
-- Returns the epoch of its lease.
local engine, session = unpack(ARGV)
local state = P .. 'engine:' .. engine

give_back(engine, call('HGET', state, 'session') ~= session)
call('DEL', P .. 'orders:' .. engine)
call('HSET', state, 'session', session, 'seq', 0)
call('PEXPIRE', state, MEMORY_MS)
return call('HGET', state, 'epoch') or '0'
