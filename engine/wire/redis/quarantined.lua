-- Delete the quarantined request `drop` ('': none), then list the remaining ones, oldest first.  Returns {payload,
-- attempts, tokens in the log, engine, unix ms} for each entry.
local drop = ARGV[1]

if drop ~= '' then
  call('ZREM', P .. 'quarantine', drop)
  call('DEL', P .. 'quarantine:' .. drop)
end
local found = {}
for _, id in ipairs(call('ZRANGE', P .. 'quarantine', 0, -1)) do
  local entry = call('HMGET', P .. 'quarantine:' .. id, 'payload', 'attempts', 'said', 'engine', 'at')
  if entry[1] then found[#found + 1] = entry end
end
return found
