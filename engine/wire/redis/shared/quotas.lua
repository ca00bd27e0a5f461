-- Quotas of a tenant: "Quotas" in KEYS.md.  A bucket is stored as the unix ms at which it will be full (GCRA).

-- Returns ms until the bucket is full, at most QUOTA_MS: then it is empty, or Redis' clock has been set back since.
local function bucket_debt(tenant, bucket, now)
  return math.min(QUOTA_MS, math.max(0, (call('HGET', P .. 'quota:' .. tenant, bucket) or 0) - now))
end

local function precise(ms)  -- ms as text, because numbers in a reply lose their fraction
  return string.format('%.6f', ms)
end

local function shift_bucket(tenant, bucket, ms, now)  -- move the time at which a bucket is full; negative ms: a refund
  call('HSET', P .. 'quota:' .. tenant, bucket, precise(now + bucket_debt(tenant, bucket, now) + ms))
end

local function refund_bucket(tenant, bucket, ms)  -- refund `ms` to a bucket; an expired bucket is full already
  if call('HEXISTS', P .. 'quota:' .. tenant, bucket) == 1 then shift_bucket(tenant, bucket, -ms, now_ms()) end
end

local function bucket_debts(tenant, now)  -- ms until the buckets of requests and of tokens are full
  return precise(bucket_debt(tenant, 'requests', now)), precise(bucket_debt(tenant, 'tokens', now))
end

local function prompts_of(tenant, request)  -- iterator over the ids of a request's prompts that are not settled
  local held = P .. 'quota_held:' .. tenant
  local prompts, at = tonumber(string.match(call('HGET', held, request) or '0', '^%d+')), -1
  return function()
    while at < prompts - 1 do
      at = at + 1
      local id = request .. '.' .. at
      if call('HEXISTS', held, id) == 1 then return id end
    end
  end
end

local function forget_request(tenant, request)  -- delete all quota entries of a request
  local held = P .. 'quota_held:' .. tenant
  for id in prompts_of(tenant, request) do call('HDEL', held, id) end
  call('HDEL', held, request)
  call('ZREM', P .. 'quota_open:' .. tenant, request)
  call('ZREM', P .. 'quota_checks', request .. ' ' .. tenant)
end

-- Settle an ended prompt: give back the output tokens that it took and did not generate.  Idempotent.  A prompt whose
-- log is gone gives nothing back, since the bucket fills with time.
local function settle_quota(tenant, id)
  local held = P .. 'quota_held:' .. tenant
  local entry = call('HGET', held, id)
  if not entry or alive(id) then return end
  local _, output, token_ms = unpack(cmsgpack.unpack(entry))
  call('HDEL', held, id)
  if choice_count(id) > 0 then refund_bucket(tenant, 'tokens', (output - generated_tokens(id)) * token_ms) end
  local request = string.match(id, '^(.*)%.%d+$')
  if not prompts_of(tenant, request)() then forget_request(tenant, request) end
end

-- Settle all prompts of an ended request.
local function settle_request(tenant, request)
  for id in prompts_of(tenant, request) do
    flush_tail_for(id)
    settle_quota(tenant, id)
  end
  forget_request(tenant, request)
end

-- Settle ended requests that no gateway settles: their gateway died, settled them before they ended, or could not give
-- back what a failed submit took; or their keys expired, were evicted or lost in a failover.
local function check_quotas()
  local key, now = P .. 'quota_checks', now_ms()
  for _, member in ipairs(call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, QUOTA_CHECKS)) do
    local request, tenant = string.match(member, '^(%S+) (.*)$')
    local known = false  -- whether a prompt runs or its end is remembered, so that a gateway may still settle it
    for id in prompts_of(tenant, request) do known = known or call('EXISTS', P .. 'req:' .. id) == 1 end
    if not known then settle_request(tenant, request) else call('ZADD', key, now + QUOTA_CHECK_MS, member) end
  end
end
