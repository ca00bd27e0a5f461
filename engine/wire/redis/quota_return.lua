-- Give back everything that a request took from its tenant's quotas, because it was not queued.  Idempotent.
-- Returns ms until the buckets of requests and of tokens are full.
local tenant, request = unpack(ARGV)
local held, now = P .. 'quota_held:' .. tenant, now_ms()

local entry = call('HGET', held, request)
if entry then
  refund_bucket(tenant, 'requests', tonumber(string.match(entry, '[^ ]+$')))
  for id in prompts_of(tenant, request) do
    local size, output, token_ms = unpack(cmsgpack.unpack(call('HGET', held, id)))
    refund_bucket(tenant, 'tokens', (size + output) * token_ms)
  end
  forget_request(tenant, request)
end
return {bucket_debts(tenant, now)}
