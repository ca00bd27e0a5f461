-- One sync of an engine: log and publish its tokens, end and claim requests, take control messages, renew the lease.
-- ARGV: packed, load, tokens, added, removed, ...  `packed`: msgpack map:
--   engine, session     the engine's name; id of its process
--   seq, epoch          sequence number of this sync of the process; epoch of the lease (text)
--   lease_ms            length of the lease
--   free_tokens, free_requests   free capacity: prompt tokens and requests it may claim
--   claim_tokens        prompt tokens to claim in one sync; the request that exceeds them is the last one claimed
--   preemptible_tokens        as in EngineLoad
--   preempt_claim_tokens      as claim_tokens, for claims by preemption: also if nothing is free
--   late_share          minimum fraction of the claimed prompt tokens that comes from the late lane
--   finished            ids of requests that have ended
--   returned            {id = error line}: requests whose LoRA adapter the engine does not have
--   produced            {tenant = output tokens}
--   segments            flat list for the logs: id, choice, output position, number of tokens, ...
--   flushes_tail        whether the segments contain all tokens of the tail, so that it can be deleted
--   keeps_tail          whether the messages go into the tail
--   publishes           '1': the engine publishes its prefixes; 'afresh': `added` are all of them; '': it does not
--   token_us, step_us   us per prompt token, 0: unknown; us of a decode-only step
--   backlog             prompt tokens that the engine has claimed and not computed
--   load_us, loads      us until one more LoRA adapter would be loaded, 0: unknown, negative: it takes no adapters;
--                       adapters that wait for their load
--   extras              number of entries (id, field or "logprobs INDEX FIRST", value) for the logs
-- `load`: msgpack EngineLoad.  `tokens`: tokens of all segments, 4 bytes each.  `added`, `removed`: prefix digests.
-- Then the extras, three words each; then for each token message: its channel ('' for none), the message.
-- Returns false if nothing was done and the engine has to rejoin.  Otherwise returns {
--   {{payload, gateways that listen, {{tokens, Finish} of each choice}, cached prompt tokens, 1 if it was passed over}
--     for each claimed request; no choices if no engine has held it before},
--   control messages, waiting requests, engines, Redis' unix ms, 1 if a gateway watches the engines' blocks, ms after
--   which the engine should sync again, because it has left a request to another engine; 0: it has left none, 1 if
--   Redis had no digests of this engine, because they expired with a lease that was not renewed in time
-- }.
local packed, load, tokens, added, removed = unpack(ARGV, 1, 5)
local x = cmsgpack.unpack(packed)
x.load, x.claimed, x.works, x.orders = load, {}, {}, {}
local EXTRAS, MESSAGES = 6, 6 + 3 * x.extras  -- first index in ARGV of extras and of messages
local state, tail = P .. 'engine:' .. x.engine, P .. 'tail:' .. x.engine

local known_session, known_seq, known_epoch, suspect, known_left = unpack(
  call('HMGET', state, 'session', 'seq', 'epoch', 'trial', 'room'))
if known_session and known_session ~= x.session then return redis.error_reply('SUPERSEDED') end
known_seq = tonumber(known_seq)
local repeated = known_seq == x.seq  -- a retry: the sync has run, only its reply was lost
if not repeated then
  if (known_epoch or '0') ~= x.epoch or (known_seq or -1) + 1 ~= x.seq then return false end
  if leaves_hole(x.segments) then return false end
end

call('PEXPIRE', state, MEMORY_MS)  -- first write: one that Redis allows when its memory is full
renew_lease(x.engine, load, x.lease_ms)
local waiting, engines = call('HLEN', P .. 'waiting'), call('ZCARD', P .. 'engines')
-- The digests are renewed with the lease.  The engine sends only changes, so the reply says if there are no digests.
local vanished = x.publishes ~= '' and 1 - call('PEXPIRE', P .. 'prefixes:' .. x.engine, x.lease_ms) or 0
if repeated then return repeated_reply(x, waiting, engines, vanished) end

charge_output(x.produced)
append_segments(x.segments, tokens)
if x.flushes_tail then call('DEL', tail) end
append_extras(EXTRAS, MESSAGES - 1)
publish_messages(MESSAGES, x.keeps_tail and tail)
for _, id in ipairs(x.finished) do
  if call('ZREM', P .. 'held:' .. x.engine, id) == 1 then bury(id) end
end
publish_digests(x, added, removed)
if next(x.returned) then
  if suspect and x.returned[suspect] then
    call('HDEL', state, 'trial')
    suspect = nil
  end
  take_returned(x)
end

-- One command checks four keys that rarely exist.
local rare = call('EXISTS', P .. 'suspects', P .. 'orders:' .. x.engine, P .. 'watch', P .. 'lacking') > 0
x.lacking = rare and call('EXISTS', P .. 'lacking') == 1
local closed, retry = (suspect or rare) and isolates(x, suspect), 0
if closed then x.free_tokens = 0 elseif waiting > 0 then retry = claim_share(x, waiting, engines) end
local left = #x.claimed < x.free_requests and x.free_tokens or 0  -- 0 if no slot is free
if waiting > 0 and x.preemptible_tokens > 0 and not closed then claim_by_preemption(x) end
if rare then collect_orders(x) end

if x.publishes == 'afresh' or vanished == 1 and (added ~= '' or #x.claimed > 0) then  -- the key is new
  call('PEXPIRE', P .. 'prefixes:' .. x.engine, x.lease_ms)
  if x.publishes == 'afresh' then vanished = 0 end
end
offer_capacity(x, left, known_left, waiting, closed)
-- Store the reply for a retry of this sync, and the prompt tokens that the engine would still claim.
call('HSET', state, 'seq', x.seq, 'reply', cmsgpack.pack({x.claimed, x.orders, retry, vanished}), 'room', left,
     'claims', x.claim_tokens > 0 and '1' or '0')
if x.seq == 1 then engines = engines + call('ZADD', P .. 'engines', 0, x.engine) end  -- later rejoin.lua adds it
return {x.works, x.orders, waiting - LEFT, engines, now_ms(), rare and call('EXISTS', P .. 'watch') or 0, retry,
        vanished}
