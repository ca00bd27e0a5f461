-- Parts of a sync besides logs and claims: repeated replies, published digests, control messages, offered capacity.
-- `x`: as in sync_claim.lua.

-- Returns the reply to a sync that has run before, because the first reply was lost.  Claims nothing.
local function repeated_reply(x, waiting, engines, vanished)
  local retry, before
  x.claimed, x.orders, retry, before = unpack(cmsgpack.unpack(call('HGET', P .. 'engine:' .. x.engine, 'reply')))
  for _, one in ipairs(x.claimed) do
    local payload, names, from = unpack(call('HMGET', P .. 'req:' .. one[1], 'payload', 'listeners', 'from'))
    if payload then  -- else the request was withdrawn, and an abort follows
      x.works[#x.works + 1] = work_of(payload, names, from, unpack(one))
    end
  end
  vanished = math.max(vanished, before)
  return {x.works, x.orders, waiting, engines, now_ms(), call('EXISTS', P .. 'watch'), retry, vanished}
end

local function publish_digests(x, added, removed)
  local key = P .. 'prefixes:' .. x.engine
  if x.publishes == 'afresh' then call('DEL', key) end
  if removed ~= '' then each_part('SREM', key, removed) end
  if added ~= '' then each_part('SADD', key, added) end
end

-- Add the engine's pending control messages to the reply.  If one names the new listeners of a request, send them the
-- ends of its logs: the tokens of this sync, perhaps the last ones, went to the earlier listeners.
local function collect_orders(x)
  local key, routed = P .. 'orders:' .. x.engine, {}
  for _, text in ipairs(call('LRANGE', key, 0, -1)) do
    x.orders[#x.orders + 1] = text
    local id, names = string.match(text, '^(.*) >(.*)$')
    if id then routed[id] = names end
  end
  call('DEL', key)
  if next(routed) then flush_tail(x.engine) end
  for id, names in pairs(routed) do send_log_ends(id, names) end
end

-- Record the `left` prompt tokens that the engine would still claim, and wake other engines if requests still wait: see
-- "Wake-ups" in KEYS.md.  `known`: `left` of its last sync, as text; nil: unknown.  `closed`: it runs a suspect.
local function offer_capacity(x, left, known, waiting, closed)
  offer(x.engine, left, now_ms() + math.min(STALE_MS, x.lease_ms), known)
  local claims_more = left > 0 and x.claim_tokens > 0
  if waiting > LEFT and (#x.claimed > 0 or x.blocked or known ~= '0' and not claims_more)
     or closed and #x.claimed > 0 and call('EXISTS', P .. 'suspects') == 1 then wake_engines(x.blocked or '1') end
  if claims_more then
    call('ZADD', P .. 'bells', left, x.engine)
  elseif x.preemptible_tokens > 0 and x.preempt_claim_tokens > 0 and not closed then
    call('ZADD', P .. 'bells', -x.preemptible_tokens, x.engine)
  elseif known ~= '0' then
    call('ZREM', P .. 'bells', x.engine)
  end
  if x.publishes ~= '' and left > 0 then
    local costs = struct.pack('<dddddd', left, now_ms(), x.token_us, x.step_us, x.backlog, x.load_us)
    call('HSET', P .. 'spare', x.engine, costs)
  elseif known ~= '0' then  -- if it is '0', the engine is not in the hash
    call('HDEL', P .. 'spare', x.engine)
  end
end
