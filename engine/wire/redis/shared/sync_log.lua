-- Token logs in a sync: appending to the logs, and publishing token messages.

-- Returns whether a segment begins beyond the end of its log, so that appending it would leave a hole.
local function leaves_hole(segments)
  for i = 1, #segments, 4 do
    local id, index, first = unpack(segments, i, i + 2)
    if call('STRLEN', P .. 'log:' .. id .. ':' .. index) < 4 * first and choice_count(id) > 0 then return true end
  end
  return false
end

local function append_segments(segments, tokens)  -- `tokens`: tokens of all segments, 4 bytes each
  local at = 1
  for i = 1, #segments, 4 do
    local id, index, first, count = unpack(segments, i, i + 3)
    append_tokens(id, index, first, string.sub(tokens, at, at + 4 * count - 1))
    at = at + 4 * count
  end
end

-- Write the fields and log-probabilities (id, field or "logprobs INDEX FIRST", value) in ARGV[from] to ARGV[last].
local function append_extras(from, last)
  for i = from, last, 3 do
    local id, field, value = unpack(ARGV, i, i + 2)
    local index, first = string.match(field, '^logprobs (%d+) (%d+)$')
    if index then
      append_logprobs(id, index, first, value)
    elseif call('EXISTS', P .. 'log:' .. id) == 1 then
      call('HSET', P .. 'log:' .. id, field, value)
    end
  end
end

-- Publish the (channel, message) pairs from ARGV[from] on; channel '': do not publish.  Append the messages to the list
-- `tail`, unless it is nil.
local function publish_messages(from, tail)
  for i = from, #ARGV, 2 do
    local channel, message = unpack(ARGV, i, i + 1)
    if tail then call('RPUSH', tail, message) end
    if channel ~= '' then call('PUBLISH', P .. 'tokens:' .. channel, message) end
  end
end

local function charge_output(produced)  -- charge tenants for output; `produced`: {tenant = output tokens}
  for tenant, count in pairs(produced) do
    charge(tenant, OUTPUT_COST * count)
    call('HINCRBY', P .. 'usage:' .. tenant, 'generated', count)
  end
end
