-- Order an audit of the block accounting from every engine whose load says that it audits.
-- Returns the names of those engines.
local audit = ARGV[1]  -- its id

local ordered = {}
for _, engine in ipairs(call('SMEMBERS', P .. 'engines')) do
  local load = call('GET', P .. 'lease:' .. engine)
  if load and (cmsgpack.unpack(load).audits or 0) > 0 then
    order(engine, audit .. ' ?')
    ordered[#ordered + 1] = engine
  end
end
return ordered
