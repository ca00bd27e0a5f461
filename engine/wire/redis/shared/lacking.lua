-- LoRA adapters whose files an engine does not have: it leaves their requests to others.  "Adapters" in KEYS.md.
--
--   claimed --engine finds no files--> returned to its place --another engine--> claimed
--                                          '-- no other engine may have them, for LACKING_MS --> ends with an error

-- Which of these adapters the engine could not find lately: index -> true.  `digests`: '' for the base model.
local function lacked_of(engine, digests)
  local words, places, lacked = {}, {}, {}
  for at, digest in ipairs(digests) do
    if digest ~= '' then
      words[#words + 1] = digest .. engine
      places[#words] = at
    end
  end
  if #words == 0 then return lacked end
  for n, ends in ipairs(call('ZMSCORE', P .. 'lacking', unpack(words))) do
    lacked[places[n]] = ends and tonumber(ends) > now_ms() or nil
  end
  return lacked
end

-- The digest of the LoRA adapter that a request needs, '' for none, and the digests of its prefixes.  In the field
-- `prefixes` the adapter's comes first, behind one letter.
local function split_adapter(digests)
  if #digests % DIGEST_BYTES == 0 then return '', digests end
  return string.sub(digests, 2, DIGEST_BYTES + 1), string.sub(digests, DIGEST_BYTES + 2)
end

local function adapter_of(id)  -- the digest of the adapter that a request needs, '' for none
  return (split_adapter(call('HGET', P .. 'req:' .. id, 'prefixes') or ''))
end

-- Whether the engine leaves the request to others.  `x`: as in exchange_claim.lua.
local function leaves(x, id)
  return x.lacking and lacked_of(x.engine, {adapter_of(id)})[1]
end

local function others_may_have(me, digest)  -- whether another engine takes adapters and has not just missed this one
  for _, engine in ipairs(call('ZRANGE', P .. 'engines', 0, -1)) do
    local lease = engine ~= me and call('GET', P .. 'lease:' .. engine)
    if lease and not lacked_of(engine, {digest})[1] then
      local report = cmsgpack.unpack(string.sub(lease, LEASE_HEAD + 1))
      for _, word in ipairs(not report[LOAD_DRAINING] and report[LOAD_HONOURS] or {}) do
        if word == 'adapter' then return true end
      end
    end
  end
  return false
end

-- For how many ms engines have returned the request, counted from the first time since it has produced a token.
local function lacked_ms(id)
  local key, said = P .. 'req:' .. id, logged_tokens(id)
  local since, before = string.match(call('HGET', key, 'lacked') or '', '^(%d+) (%d+)$')
  if tonumber(before) == said then return now_ms() - since end
  call('HSET', key, 'lacked', string.format('%.0f %.0f', now_ms(), said))
  return 0
end

-- Take back the requests that the engine has no adapter for: id -> one line for the client.
local function take_returned(x)
  for id, why in pairs(x.returned) do
    if call('ZSCORE', P .. 'held:' .. x.engine, id) and let_go(x.engine, id) then
      local digest = adapter_of(id)
      call('ZADD', P .. 'lacking', now_ms() + LACKING_MS, digest .. x.engine)
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
  ring('1')
end
