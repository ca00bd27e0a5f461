-- Give back all that a request took of its tenant's quotas: it was not queued.  Does nothing a second time.
-- Returns ms until the buckets of requests and of tokens are full.
local tenant, request = unpack(ARGV)
local held, now = P .. 'quota_held:' .. tenant, now_ms()

local entry = call('HGET', held, request)
if entry then
  shift_bucket(tenant, 'requests', -string.match(entry, '[^ ]+$'))
  for id in prompts_of(tenant, request) do
    local size, output, token_ms = unpack(cmsgpack.unpack(call('HGET', held, id)))
    shift_bucket(tenant, 'tokens', -(size + output) * token_ms)
  end
  forget_request(tenant, request)
end
local function shown(ms) return string.format('%.6f', ms) end
return {shown(bucket_debt(tenant, 'requests', now)), shown(bucket_debt(tenant, 'tokens', now))}
