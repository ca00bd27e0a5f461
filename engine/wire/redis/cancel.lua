-- Withdraw requests, or single choices of them.
-- ARGV: the gateway, then for each withdrawal: id, index of the choice.  Index -1: all choices, unless another gateway
-- listens.  Index -2: all choices, and every listening gateway gets the Finish.
local gateway = ARGV[1]

local function drop_choice(id, index)
  local key = P .. 'req:' .. id
  local engine, dropped = unpack(call('HMGET', key, 'engine', 'dropped'))
  call('HDEL', key, 'dropped')  -- deletes first: Redis runs that even when its memory is full
  call('HSET', key, 'dropped', (dropped or '') .. ' ' .. index)
  if engine then order(engine, id .. ' ' .. index) end
end

local function cancel_for_all(id)
  local names = listeners(id)
  withdraw(id)
  send_log_ends(id, names)
end

for i = 2, #ARGV, 2 do
  local id, index = ARGV[i], ARGV[i + 1]
  if index == '-1' then
    if other_listeners(id, gateway) == '' then withdraw(id) else unlisten(id, gateway) end
  elseif index == '-2' then
    if alive(id) then cancel_for_all(id) end
  elseif alive(id) then
    drop_choice(id, index)
  end
end
