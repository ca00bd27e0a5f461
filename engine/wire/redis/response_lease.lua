-- Renew the leases of responses that run in the background, by `lease` ms.
-- Take over at most `most` whose lease has lapsed.
-- The further arguments are the ids that the caller answers for.
-- Returns {ids of those that do not run any more, {{id, holder} of each that the caller answers for from now on}}.
local lease, most = unpack(ARGV)
local running, now, stopped, taken = P .. 'responses_running', now_ms(), {}, {}

for at = 3, #ARGV do
  if call('ZSCORE', running, ARGV[at]) then
    call('ZADD', running, now + lease, ARGV[at])
  else
    stopped[#stopped + 1] = ARGV[at]
  end
end
for _, id in ipairs(call('ZRANGEBYSCORE', running, '-inf', now, 'LIMIT', 0, most)) do
  local holder = call('HGET', P .. 'response:' .. id, 'holder')
  if holder then
    call('ZADD', running, now + lease, id)
    taken[#taken + 1] = {id, holder}
  else
    call('ZREM', running, id)
  end
end
return {stopped, taken}
