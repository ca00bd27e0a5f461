-- Renew the caller's leases of background responses for `lease` ms, and take over at most `most` responses whose lease
-- has lapsed.  The further arguments are the ids of the responses that the caller runs.
-- Returns {ids of these responses that do not run any more, {{id, holder} of each response taken over}}.
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
