-- Delete a response of `holder`.  Returns 1 if it existed, else 0.
local holder, id = unpack(ARGV)

if call('HGET', P .. 'response:' .. id, 'holder') ~= holder then return 0 end
forget_response(holder, id)
return 1
