-- Ends of requests, and the next request of a lane, because the search for it ends requests past their deadline.

local function bury(id)  -- delete an ended request; its log stays for its `retain` time
  local key = P .. 'req:' .. id
  local names = listeners(id)
  call('DEL', key)
  call('HSET', key, 'gone', '1')
  call('PEXPIRE', key, TOMBSTONE_MS)
  for name in each_of(names) do call('SREM', P .. 'open:' .. name, id) end
  if names == '' then call('ZREM', P .. 'orphans', id) end
  keep(id)
end

local function withdraw(id)  -- end the request as cancelled, and abort it at its engine
  local engine = call('HGET', P .. 'req:' .. id, 'engine')
  local waited = dequeue(id)
  bury(id)
  finish_open(id, cmsgpack.pack({'cancelled'}))
  if engine and not waited then
    call('HSET', P .. 'req:' .. id, 'from', engine)  -- it may have unflushed tokens of the request, see flush_tail_for
    order(engine, id)
  end
end

local function unlisten(id, gateway, grace)  -- remove a listener; without listeners the request ends after `grace` ms
  local rest = other_listeners(id, gateway)
  call('SREM', P .. 'open:' .. gateway, id)
  if alive(id) then
    route(id, rest)
    if rest == '' then call('ZADD', P .. 'orphans', now_ms() + grace, id) end
  end
end

local function end_with(id, finish)  -- end a request that no engine holds, and send this Finish to its listeners
  finish_open(id, cmsgpack.pack(finish))
  send_log_ends(id, listeners(id))
  bury(id)
end

-- Returns the prompt tokens of a waiting request, and its due time in unix ms.  A request that has ended or is past its
-- deadline is removed from the queue, and the result is nil.
local function claimable(id, now)
  local tokens, deadline, due = unpack(call('HMGET', P .. 'req:' .. id, 'tokens', 'deadline', 'due'))
  if tokens and tonumber(deadline) > now then return tonumber(tokens), tonumber(due) end
  dequeue(id)
  if tokens then end_with(id, {'deadline'}) end
end

-- Returns id, prompt tokens, tenant and due time of the lane's next request.  `left_out`: as in turns.lua.  Moves at
-- most MOVES on-time requests that are past their due time to the late lane.
local function head(lane, left_out)
  local now, moved = now_ms(), 0
  while true do
    local tenant = next_tenant(lane, left_out)
    if not tenant then return nil end
    local id = call('ZRANGE', P .. 'queue:' .. lane .. ':' .. tenant, '0', '0')[1]
    local tokens, due
    if id then tokens, due = claimable(id, now) else forget_queue(lane, tenant) end
    if tokens then
      if lane == 'late' or not due or due > now or moved == MOVES then return id, tokens, tenant, due end
      move_to_late(id)
      note_entry(left_out, 'late')
      moved = moved + 1
    elseif id then
      call('ZREM', P .. 'queue:' .. lane .. ':' .. tenant, id)  -- it is still there if Redis has evicted `waiting`
    end
  end
end

local function first_suspect()  -- returns id and prompt tokens of the next suspect
  local now = now_ms()
  while true do
    local id = call('ZRANGE', P .. 'suspects', 0, 0)[1]
    if not id then return nil end
    local tokens = claimable(id, now)
    if tokens then return id, tokens end
  end
end
