-- Record in the usage ledger how many tokens of each choice reached a client, and settle quotas of ended requests.
-- ARGV for each request: id, tenant, number of choices, then the delivered tokens of each choice.
-- Returns for each request {tokens generated, tokens delivered, delivered tokens that no earlier call has recorded}.
-- If Redis has lost the log, the earlier counts are unknown, so nothing is recorded.
local words = ARGV

local found, i = {}, 1
while i <= #words do
  local id, tenant, n = unpack(words, i, i + 2)
  local log, known, delivered, new = P .. 'log:' .. id, choice_count(id) > 0, 0, 0
  flush_tail_for(id)
  for index = 0, n - 1 do
    local before = tonumber(call('HGET', log, 'delivered:' .. index) or 0)
    local now = math.max(before, words[i + 3 + index])
    delivered = delivered + now
    if known and now > before then
      new = new + now - before
      call('HSET', log, 'delivered:' .. index, now)
    end
  end
  if new > 0 then call('HINCRBY', P .. 'usage:' .. tenant, 'delivered', new) end
  settle_quota(tenant, id)
  found[#found + 1] = {generated_tokens(id), delivered, new}
  i = i + 3 + n
end
return found
