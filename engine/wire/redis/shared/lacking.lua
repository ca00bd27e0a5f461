-- Missing LoRA adapters: an engine without an adapter's files, or without LoRA support, leaves its requests to other
-- engines.  "Adapters" in KEYS.md.
--
--   claimed --engine cannot use it--> returns to its place --another engine--> claimed
--                                         '-- no other engine may have the files, for LACKING_MS --> ends with an error

local ALL_ADAPTERS = string.rep('\0', DIGEST_BYTES)  -- digest in `lacking` of an engine that takes no adapter at all

-- Returns {index = true} for the adapters that the engine lacked when it last claimed a request for them.  `digests`:
-- '' for the base model.
local function lacked_of(engine, digests)
  local words, places, lacked = {ALL_ADAPTERS .. engine}, {}, {}
  for at, digest in ipairs(digests) do
    if digest ~= '' then
      words[#words + 1] = digest .. engine
      places[#words] = at
    end
  end
  if #words == 1 then return lacked end
  local ends = call('ZMSCORE', P .. 'lacking', unpack(words))
  for n = 2, #words do
    local last = math.max(tonumber(ends[1] or 0), tonumber(ends[n] or 0))
    lacked[places[n]] = last > now_ms() or nil
  end
  return lacked
end

-- Splits a request's field `prefixes` into the digest of its LoRA adapter, '' for none, and its prefix digests.  The
-- adapter's digest comes first, after one letter.
local function split_adapter(digests)
  if #digests % DIGEST_BYTES == 0 then return '', digests end
  return string.sub(digests, 2, DIGEST_BYTES + 1), string.sub(digests, DIGEST_BYTES + 2)
end

local function adapter_of(id)  -- returns the digest of a request's LoRA adapter; '': the base model
  return (split_adapter(call('HGET', P .. 'req:' .. id, 'prefixes') or ''))
end

-- Returns whether the engine leaves a request to others, because it lacks the adapter.  `x`: as in sync_claim.lua.
local function leaves(x, id)
  return x.lacking and lacked_of(x.engine, {adapter_of(id)})[1]
end

local function takes_adapters(report)  -- whether an engine supports adapters, by its unpacked EngineLoad
  for _, word in ipairs(report[LOAD_HONOURS] or {}) do
    if word == 'adapter' then return true end
  end
  return false
end

local function others_may_have(me, digest)  -- whether another engine takes adapters, and does not lack this adapter
  for _, engine in ipairs(call('ZRANGE', P .. 'engines', 0, -1)) do
    local lease = engine ~= me and call('GET', P .. 'lease:' .. engine)
    if lease and not lacked_of(engine, {digest})[1] then
      local report = cmsgpack.unpack(string.sub(lease, LEASE_HEAD + 1))
      if not report[LOAD_DRAINING] and takes_adapters(report) then return true end
    end
  end
  return false
end

-- Returns the ms since an engine first returned the request because it lacks the adapter; a produced token resets them.
local function lacked_ms(id)
  local key, said = P .. 'req:' .. id, logged_tokens(id)
  local since, before = string.match(call('HGET', key, 'lacked') or '', '^(%d+) (%d+)$')
  if tonumber(before) == said then return now_ms() - since end
  call('HSET', key, 'lacked', string.format('%.0f %.0f', now_ms(), said))
  return 0
end

-- Requeue the requests that the engine returns because it lacks their adapters, or end them with an error.
local function take_returned(x)
  local supports = takes_adapters(cmsgpack.unpack(x.load))
  for id, why in pairs(x.returned) do
    if call('ZSCORE', P .. 'held:' .. x.engine, id) and let_go(x.engine, id) then
      local digest = adapter_of(id)
      call('ZADD', P .. 'lacking', now_ms() + LACKING_MS, (supports and digest or ALL_ADAPTERS) .. x.engine)
      call('PEXPIRE', P .. 'lacking', LACKING_MS)
      local place, attempts = unpack(call('HMGET', P .. 'req:' .. id, 'place', 'attempts'))
      if lacked_ms(id) >= LACKING_MS and not others_may_have(x.engine, digest) then
        end_with(id, {'error', -1, why, 0, 0, 0, 'constraint'})
      elseif tonumber(attempts or 0) >= MAX_ATTEMPTS then
        call('ZADD', P .. 'suspects', place, id)
      else
        enqueue(id)
      end
    end
  end
  wake_engines('1')
end
