-- Keep the logs of these requests, which are over, for another `retain` ms each.
local ids = ARGV

for _, id in ipairs(ids) do keep(id) end
