-- Returns {lane, number of requests ahead} for each of these requests: the older requests in its lane and, for a late
-- request, all on-time requests.  The lane is '' for a request that does not wait.
local ids = ARGV

local on_time, found = call('ZCARD', P .. 'ages:on_time'), {}
for i, id in ipairs(ids) do
  local late = call('ZRANK', P .. 'ages:late', id)
  local rank = late or call('ZRANK', P .. 'ages:on_time', id)
  found[i] = {late and 'late' or rank and 'on_time' or '', late and on_time + late or rank or 0}
end
return found
