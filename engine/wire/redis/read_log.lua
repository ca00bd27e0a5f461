-- Read part of one choice's log: at most `count` tokens from output position `first` on.
-- Returns false if the log does not exist, else {tokens, Finish, head, logprobs}; the Finish only with the last token.
local id, index, first, count = unpack(ARGV)
local log = P .. 'log:' .. id
local key, last = log .. ':' .. index, first + count - 1

if tonumber(index) >= choice_count(id) then return false end
local finish, first_delta = unpack(call('HMGET', log, 'finish:' .. index, 'head:' .. index))
-- The unflushed tail is rarely needed: slow readers ask for tokens that are in the log already.
if call('STRLEN', key) < 4 * (last + 1) then flush_tail_for(id) end
if call('STRLEN', key) > 4 * (last + 1) then finish = false end
return {call('GETRANGE', key, 4 * first, 4 * last + 3), finish, first_delta,
        call('LRANGE', key .. ':logprobs', first, last)}
