-- Read part of one choice's log: at most `count` tokens from output position `first` on.
-- Returns false without a log, else {tokens, Finish, head, logprobs}; the Finish with the last token only.
local id, index, first, count = unpack(ARGV)
local log = P .. 'log:' .. id
local key, last = log .. ':' .. index, first + count - 1

if tonumber(index) >= continuations(id) then return false end
local finish, first_delta = unpack(call('HMGET', log, 'finish:' .. index, 'head:' .. index))
-- Slow readers read logs, so what is read nearly always stands in the log: the unflushed tails are rarely needed.
if call('STRLEN', key) < 4 * (last + 1) then fold_for(id) end
if call('STRLEN', key) > 4 * (last + 1) then finish = false end
return {call('GETRANGE', key, 4 * first, 4 * last + 3), finish, first_delta,
        call('LRANGE', key .. ':logprobs', first, last)}
