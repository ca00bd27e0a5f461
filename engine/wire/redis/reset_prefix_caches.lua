-- Send every engine with a live lease the command to empty its prefix cache.  Returns the names of these engines.
local told = {}
for _, engine in ipairs(call('ZRANGE', P .. 'engines', 0, -1)) do
  if call('EXISTS', P .. 'lease:' .. engine) == 1 then
    order(engine, '!reset_prefix_cache')
    told[#told + 1] = engine
  end
end
return told
