-- Take the maximum usage of a request from its tenant's quotas, all or nothing.  `requests`, `tokens`: quotas per
-- minute; '': no such quota.  `at_once`: maximum concurrent requests; '': no such quota; '-': a stored answer is sent
-- again, so that no request runs and nothing is settled later.  `request`: id of the client's request, without a
-- prompt's number; '': only read the buckets.  Then for each prompt: its tokens, maximum output tokens of all its
-- choices.  Returns {exhausted quota ('': none), ms until its bucket has enough, ms until the bucket of requests is
-- full, ms until the bucket of tokens is full}.
local tenant, requests, tokens, at_once, request, deadline = unpack(ARGV, 1, 6)
local FIRST = 7  -- first prompt in ARGV
local key, held, open = P .. 'quota:' .. tenant, P .. 'quota_held:' .. tenant, P .. 'quota_open:' .. tenant
local now, prompts = now_ms(), (#ARGV - FIRST + 1) / 2
local cost = {requests = 0, tokens = 0}  -- ms by which the request moves each bucket's fill time
local token_ms = tokens == '' and 0 or QUOTA_MS / tokens

local function is_open(id)  -- whether a request is concurrent: a prompt has not ended, or its submit is running
  local taken = string.match(call('HGET', held, id) or '', '^%d+ (%d+)')
  local gone = not taken or math.abs(now - taken) > TOMBSTONE_MS  -- negative: Redis' clock was set back
  for prompt in prompts_of(tenant, id) do
    if alive(prompt) then return true end
    gone = gone or call('EXISTS', P .. 'req:' .. prompt) == 1
  end
  return not gone
end

local function end_finished()  -- settle ended requests now; settle.lua would do it only a moment later
  for _, id in ipairs(call('ZRANGE', open, 0, -1)) do
    if not is_open(id) then settle_request(tenant, id) end
  end
end

local function has_place()
  if at_once == '' or at_once == '-' or call('ZCARD', open) < at_once + 0 then return true end
  end_finished()
  return call('ZCARD', open) < at_once + 0
end

local function verdict()  -- returns the exhausted quota, '' for none, and ms until it has enough
  local used_up, wait = '', 0
  for bucket, ms in pairs(cost) do
    local missing = bucket_debt(tenant, bucket, now) + ms - QUOTA_MS
    if ms > 0 and missing > 1e-3 and missing > wait then used_up, wait = bucket, missing end
  end
  if used_up == '' and not has_place() then return 'concurrent', 0 end
  return used_up, wait
end

local function outlive(name, ms)  -- let a key expire no earlier than `ms` from now
  if call('PTTL', name) < ms then call('PEXPIRE', name, ms) end
end

local function take()
  for bucket, ms in pairs(cost) do
    if ms > 0 then shift_bucket(tenant, bucket, ms, now) end
  end
  if at_once == '-' then return outlive(key, QUOTA_MS + EXPIRY_MS) end
  call('HSET', held, request, string.format('%d %d %.6f', prompts, now, cost.requests))
  for i = 0, prompts - 1 do
    local size, output = unpack(ARGV, FIRST + 2 * i, FIRST + 2 * i + 1)
    call('HSET', held, request .. '.' .. i, cmsgpack.pack({tonumber(size), tonumber(output), token_ms}))
  end
  local expires = math.max(deadline, now + QUOTA_MS) + EXPIRY_MS
  call('ZADD', open, expires, request)
  call('ZADD', P .. 'quota_checks', now + QUOTA_CHECK_MS, request .. ' ' .. tenant)
  for _, name in ipairs({key, held, open, P .. 'quota_checks'}) do outlive(name, expires - now) end
end

local used_up, wait = '', 0
if request ~= '' and call('HEXISTS', held, request) == 0 then  -- else a retry whose first reply was lost
  if call('EXISTS', open) == 0 then call('DEL', held) end  -- Redis has evicted the ids of these entries
  for _, old in ipairs(call('ZRANGEBYSCORE', open, '-inf', now)) do forget_request(tenant, old) end
  if requests ~= '' then cost.requests = QUOTA_MS / requests end
  for i = FIRST, #ARGV do cost.tokens = cost.tokens + ARGV[i] * token_ms end
  used_up, wait = verdict()
  if used_up == '' then take() end
end
return {used_up, precise(wait), bucket_debts(tenant, now)}
