-- The token log: 4 bytes per token, little endian.  "The token log" in KEYS.md explains logs and tails.

local function expire_with_log(id, key)  -- let a new key of a log expire together with the log
  local ms = call('PTTL', P .. 'log:' .. id)
  if ms > 0 then call('PEXPIRE', key, ms) else call('DEL', key) end
end

local function choice_count(id)  -- number of choices of the request; 0 if it has no log
  return tonumber(call('HGET', P .. 'log:' .. id, 'n') or 0)
end

-- Append tokens, 4 bytes each; `first`: output position of the first one.  Skips tokens that the log has already, and
-- does nothing if the tokens would leave a hole.
local function append_tokens(id, index, first, tokens)
  local key = P .. 'log:' .. id .. ':' .. index
  local length = call('STRLEN', key)
  local skip = length - 4 * first
  if skip < 0 or skip >= #tokens then return end
  if skip > 0 then tokens = string.sub(tokens, skip + 1) end
  call('APPEND', key, tokens)
  if length == 0 then expire_with_log(id, key) end
end

-- Append log-probabilities, as append_tokens does for tokens.  `values`: each value follows its length in 4 bytes.
local function append_logprobs(id, index, first, values)
  local key = P .. 'log:' .. id .. ':' .. index .. ':logprobs'
  local length, at = call('LLEN', key), 1
  local skip = length - first
  if skip < 0 then return end
  while at <= #values do
    local size = struct.unpack('<I', values, at)
    if skip > 0 then skip = skip - 1 else call('RPUSH', key, string.sub(values, at + 4, at + 3 + size)) end
    at = at + 4 + size
  end
  if length == 0 then expire_with_log(id, key) end
end

local ID_KINDS = {[0] = 'chatcmpl-', 'cmpl-', 'msg_', 'resp_'}

local function text_id(id)  -- text of a compact request id, see request_ids.py
  local first = string.byte(id)
  if first >= 16 then return id end
  local digits = string.format(string.rep('%02x', 16), first % 4, string.byte(id, 2, 16))
  local prompt = #id > 16 and struct.unpack('>H', id, 17) or 0
  return ID_KINDS[math.floor(first / 4)] .. digits .. '.' .. prompt
end

local function flush_tail(engine)  -- append the tokens of the engine's unflushed tail to the logs, and delete the tail
  local key = P .. 'tail:' .. engine
  local messages = call('LRANGE', key, 0, -1)
  if #messages == 0 then return end
  call('DEL', key)  -- deletes first: Redis runs that even when its memory is full
  for _, message in ipairs(messages) do
    for _, part in ipairs(cmsgpack.unpack(message)[2]) do
      for _, delta in ipairs(part[2]) do
        local first, tokens, index = delta[2], delta[3], delta[5] or 0
        for i, token in ipairs(tokens) do tokens[i] = struct.pack('<I', token) end
        append_tokens(text_id(delta[1]), index, first, table.concat(tokens))
      end
    end
  end
end

-- Flush the tail of the engine that holds the request, or held it when it was withdrawn.  If an engine has ended the
-- request, the log is complete, and nothing is flushed.
local function flush_tail_for(id)
  local engine, gone, from = unpack(call('HMGET', P .. 'req:' .. id, 'engine', 'gone', 'from'))
  if engine or gone and from then flush_tail(engine or from) end
end

local function logged_tokens(id)  -- tokens in the logs of all choices together, without unflushed tokens
  local bytes = 0
  for i = 0, choice_count(id) - 1 do bytes = bytes + call('STRLEN', P .. 'log:' .. id .. ':' .. i) end
  return bytes / 4
end

local function generated_tokens(id)  -- logged tokens, plus the tokens of a beam search that are in no answer
  return logged_tokens(id) + (call('HGET', P .. 'log:' .. id, 'searched') or 0)
end

local function finish_open(id, finish)  -- write this msgpack Finish for every choice without one
  local log = P .. 'log:' .. id
  for i = 0, choice_count(id) - 1 do call('HSETNX', log, 'finish:' .. i, finish) end
end

local function keep(id)  -- let the log expire `retain` ms from now
  local log = P .. 'log:' .. id
  local retain, once, count = unpack(call('HMGET', log, 'retain', 'once', 'n'))
  if not retain then return end
  for i = 0, (count or 0) - 1 do
    call('PEXPIRE', log .. ':' .. i, retain)
    call('PEXPIRE', log .. ':' .. i .. ':logprobs', retain)
  end
  call('PEXPIRE', log, retain)
  if once then call('PEXPIRE', P .. 'once:' .. once, retain) end
end
