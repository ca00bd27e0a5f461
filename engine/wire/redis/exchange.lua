-- One sync of an engine: enter and publish its tokens, end requests, claim requests, take orders, renew the lease.
-- ARGV: packed, load, tokens, added, removed, ...
-- `packed`: msgpack map:
--   engine, session     the engine's name; its process
--   seq, epoch          number of this sync of the process; epoch of the lease (text)
--   lease_ms            length of the lease
--   room_tokens, room_requests   free capacity: prompt tokens and requests it may claim
--   claim_tokens        prompt tokens to claim at once; the prompt that exceeds them is the last one
--   yield_tokens        as in EngineLoad
--   late_share          least share of the claimed prompt tokens that the late lane gets
--   finished            ids of requests that have ended
--   returned            {id = why}: requests whose LoRA adapter the engine does not have, and a line for the client
--   produced            {tenant = output tokens}
--   segments            id, choice, output position, tokens, ... of what goes into the logs
--   flushes_tail        whether the segments leave nothing of the tail, which has something
--   keeps_tail          whether the messages go into the tail
--   publishes           '1' if it publishes which prefixes it holds, 'afresh' if `added` are all of them, else ''
--   token_us, step_us   time per prompt token, 0 if not known; time of a step without prompts
--   backlog             prompt tokens that it has still to compute
--   load_us, loads      time until it has loaded one more LoRA adapter, 0 if not known; adapters that wait for a load
--   extras              how many (id, field or "logprobs INDEX FIRST", value) follow, for the logs
-- `load`: msgpack EngineLoad.  `tokens`: those of all segments, 4 bytes each.  `added`, `removed`: digests of prefixes.
-- Then the extras, three words each; then for each token message: its channel ('' for none), the message.
-- Returns false if nothing was done and the engine has to rejoin.  Otherwise returns {
--   {{payload, listeners, {{tokens, Finish} of each choice}, prompt tokens held, 1 if it was passed over before}
--     for each claimed request; no choices if no engine has held it before},
--   orders, requests waiting, engines, Redis' unix ms, 1 if a gateway watches the engines' blocks,
--   ms after which the engine should ask again, because it has left a request to another one; 0: it has left none,
--   1 if Redis had no digests of this engine: they expire with a lease that it did not renew in time
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
local repeated = known_seq == x.seq  -- a retry: everything is done, only the reply did not arrive
if not repeated then
  if (known_epoch or '0') ~= x.epoch or (known_seq or -1) + 1 ~= x.seq then return false end
  if leaves_hole(x.segments) then return false end
end

call('PEXPIRE', state, MEMORY_MS)  -- a first write that full memory never refuses: syncs are what empties Redis
renew_lease(x.engine, load, x.lease_ms)
local waiting, engines = call('HLEN', P .. 'waiting'), call('ZCARD', P .. 'engines')
-- The digests are renewed with the lease.  The engine sends differences, so it must learn if there are none.
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

-- Four keys that are rarely there, at once.
local rare = call('EXISTS', P .. 'suspects', P .. 'orders:' .. x.engine, P .. 'watch', P .. 'lacking') > 0
x.lacking = rare and call('EXISTS', P .. 'lacking') == 1
local closed, retry = (suspect or rare) and isolates(x, suspect), 0
if closed then x.room_tokens = 0 elseif waiting > 0 then retry = claim_share(x, waiting, engines) end
local left = #x.claimed < x.room_requests and x.room_tokens or 0  -- without a slot free tokens are of no use
if waiting > 0 and x.yield_tokens > 0 and not closed then claim_by_preemption(x) end
if rare then collect_orders(x) end

if x.publishes == 'afresh' or vanished == 1 and (added ~= '' or #x.claimed > 0) then  -- the key is new
  call('PEXPIRE', P .. 'prefixes:' .. x.engine, x.lease_ms)
  if x.publishes == 'afresh' then vanished = 0 end
end
offer_capacity(x, left, known_left, waiting, closed)
-- What a retry of this sync gets, and for submits and other engines how many prompt tokens it would still claim.
call('HSET', state, 'seq', x.seq, 'reply', cmsgpack.pack({x.claimed, x.orders, retry, vanished}), 'room', left)
if x.seq == 1 then engines = engines + call('ZADD', P .. 'engines', 0, x.engine) end  -- REJOIN does it later
return {x.works, x.orders, waiting - LEFT, engines, now_ms(), rare and call('EXISTS', P .. 'watch') or 0, retry,
        vanished}
