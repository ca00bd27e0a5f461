-- Listeners: the gateways that listen to a request.  Their names are stored in one string, separated by newlines.

local function listeners(id)
  return call('HGET', P .. 'req:' .. id, 'listeners') or ''
end

local function each_of(names)  -- an iterator over the names
  return string.gmatch(names, '[^\n]+')
end

local function other_listeners(id, gateway)
  local rest = {}
  for name in each_of(listeners(id)) do
    if name ~= gateway then rest[#rest + 1] = name end
  end
  return table.concat(rest, '\n')
end

local function route(id, names)  -- set the gateways that listen to a request, and notify its engine
  local key = P .. 'req:' .. id
  call('HSET', key, 'listeners', names)
  local engine = call('HGET', key, 'engine')
  if engine then order(engine, id .. ' >' .. names) end
end

local function channel_of(gateway)  -- number of a gateway's token channel, as in token_messages.py
  return tonumber(string.sub(redis.sha1hex(gateway), 1, 4), 16) % TOKEN_CHANNELS
end

-- Publish to these gateways where the log ends: one Delta without tokens per choice, at the end of its log, with the
-- Finish if there is one.  A gateway that has received fewer tokens reads the log.
local function send_log_ends(id, names)
  local log, n = P .. 'log:' .. id, choice_count(id)
  local deltas = {}
  for i = 0, n - 1 do
    deltas[#deltas + 1] = string.char(0x95) .. cmsgpack.pack(id, call('STRLEN', log .. ':' .. i) / 4, {})
                          .. (call('HGET', log, 'finish:' .. i) or string.char(0xc0)) .. cmsgpack.pack(i)
  end
  local all = string.char(0xdc, math.floor(n / 256), n % 256) .. table.concat(deltas)
  for name in each_of(names) do
    local message = string.char(0x92) .. cmsgpack.pack('') .. string.char(0x91, 0x92) .. cmsgpack.pack(name) .. all
    call('PUBLISH', P .. 'tokens:' .. channel_of(name), message)
  end
end
