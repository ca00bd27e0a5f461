-- Read a request's log, and listen to the request from now on.
-- `gateway`: name of the gateway that listens; '': only read.
-- Returns false if the log does not exist, else {record, {{tokens, Finish, head, logprobs} for each choice}}.
local id, gateway = unpack(ARGV)
local log = P .. 'log:' .. id

local function listen()
  local names, known = listeners(id), false
  for name in each_of(names) do known = known or name == gateway end
  if not known then
    call('SADD', P .. 'open:' .. gateway, id)
    route(id, names == '' and gateway or names .. '\n' .. gateway)
    call('ZREM', P .. 'orphans', id)
  end
end

local n, record = unpack(call('HMGET', log, 'n', 'record'))
if not n then return false end
if gateway ~= '' and alive(id) then listen() end
flush_tail_for(id)
local found = {}
for i = 0, n - 1 do
  local finish, first_delta = unpack(call('HMGET', log, 'finish:' .. i, 'head:' .. i))
  local logprobs = call('LRANGE', log .. ':' .. i .. ':logprobs', 0, -1)
  found[i + 1] = {call('GET', log .. ':' .. i), finish, first_delta, logprobs}
end
return {record or '', found}
