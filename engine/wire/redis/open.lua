-- Run by an engine process that opens.  The requests of an earlier process with its name return to the queue.
-- Returns the epoch of the engine's lease.
local engine, session = unpack(ARGV)
local state = P .. 'engine:' .. engine

give_back(engine, call('HGET', state, 'session') ~= session)
call('DEL', P .. 'orders:' .. engine)
call('HSET', state, 'session', session, 'seq', 0)
call('PEXPIRE', state, MEMORY_MS)
return call('HGET', state, 'epoch') or '0'
