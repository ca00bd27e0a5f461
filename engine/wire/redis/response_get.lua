-- Read a response of `holder`, and with `chain` 1 those that it continues, newest first.
-- `most`: bytes after which no more are read.  `ttl`: ms that they stay from now on; 0: as long as before.
-- Returns {{{id, input, body, ended}, ...}, the id at which it ended early or ''}.
local holder, id, chain, most, ttl = unpack(ARGV)
local found, bytes = {}, 0

while id ~= '' do
  local values = call('HMGET', P .. 'response:' .. id, 'holder', 'previous', 'input', 'body', 'ended')
  local owner, previous, input, body, ended = unpack(values)
  if owner ~= holder or bytes > tonumber(most) then return {found, id} end
  bytes = bytes + #input + #body
  found[#found + 1] = {id, input, body, ended}
  if ttl ~= '0' then keep_response(holder, id, ttl) end
  id = chain == '1' and previous or ''
end
return {found, ''}
