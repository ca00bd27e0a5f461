-- Run by an engine that closes.  `died`: '1' if it failed, '0' after a drain.
-- A failed engine's state is kept, as after a lapsed lease: the next engine with its name must not warm the same
-- prefixes.
local engine, session, died = unpack(ARGV)
local state = P .. 'engine:' .. engine

if call('HGET', state, 'session') ~= session then return end
give_back(engine, died == '1')
call('DEL', P .. 'orders:' .. engine)
if died == '1' then
  call('HINCRBY', state, 'epoch', 1)
  call('PEXPIRE', state, MEMORY_MS)
else
  call('DEL', state)
end
