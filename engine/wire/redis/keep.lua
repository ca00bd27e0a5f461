-- Let the logs of these ended requests expire `retain` ms from now.
local ids = ARGV

for _, id in ipairs(ids) do keep(id) end
