-- Read a response of `holder`; with `chain` 1 also the earlier responses that it continues, newest first.
-- `most`: bytes after which no further response is read.  `ttl`: new lifetime of these responses, ms; 0: as before.
-- Returns {{{id, input, body, ended}, ...}, id of the response at which the chain was cut, or ''}.
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
