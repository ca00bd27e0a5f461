-- How a request ends, and which waiting request is next: those past their deadline end on the way.

local function bury(id)  -- the request is over: its log stays for a while
  local key = P .. 'req:' .. id
  local names = listeners(id)
  call('DEL', key)
  call('HSET', key, 'gone', 1)
  call('PEXPIRE', key, TOMBSTONE_MS)
  for name in each_of(names) do call('SREM', P .. 'open:' .. name, id) end
  call('ZREM', P .. 'orphans', id)
  keep(id)
end

local function withdraw(id)  -- end the request as cancelled, and abort it at its engine
  local engine = call('HGET', P .. 'req:' .. id, 'engine')
  local waited = dequeue(id)
  bury(id)
  finish_open(id, cmsgpack.pack({'cancelled'}))
  if engine and not waited then order(engine, id) end
end

local function unlisten(id, gateway, grace)  -- a request without a listener waits `grace` ms for one, then it ends
  local rest = other_listeners(id, gateway)
  call('SREM', P .. 'open:' .. gateway, id)
  if alive(id) then
    route(id, rest)
    if rest == '' then call('ZADD', P .. 'orphans', now_ms() + grace, id) end
  end
end

local function end_with(id, finish)  -- end a request that no engine has, and send this Finish to its listeners
  finish_open(id, cmsgpack.pack(finish))
  send_log_ends(id, listeners(id))
  bury(id)
end

local function in_time(id, now)  -- whether the request may still be claimed; otherwise it leaves
  local payload, deadline = unpack(call('HMGET', P .. 'req:' .. id, 'payload', 'deadline'))
  if payload and tonumber(deadline) > now then return true end
  dequeue(id)
  if payload then end_with(id, {'deadline'}) end
  return false
end

local function head(crowd)  -- the next request's id, of tenants not in `crowd`
  local now = now_ms()
  while true do
    local tenant
    for _, name in ipairs(call('ZRANGE', P .. 'turns', 0, crowd and -1 or 0)) do
      if not (crowd and crowd[name]) then tenant = name break end
    end
    if not tenant then return nil end
    local id = call('ZRANGE', P .. 'queue:' .. tenant, 0, 0)[1]
    if in_time(id, now) then return id end
  end
end

local function first_suspect()  -- the next suspect's id
  local now = now_ms()
  while true do
    local id = call('ZRANGE', P .. 'suspects', 0, 0)[1]
    if not id then return nil end
    if in_time(id, now) then return id end
  end
end
