-- Lanes: on-time requests, whose predicted wait meets the TTFT target, and late requests, all others.  Engines claim
-- from the on-time lane first, except for a guaranteed share of the late lane.
--
-- While both lanes have requests, each claimed on-time token adds `share` to the late lane's credit, and each claimed
-- late token subtracts 1 - share.  When the credit covers the first late request, this request is next.  So at least
-- `share` of the claimed prompt tokens are late.  The credit never falls below 0, so that claims of late requests while
-- the on-time lane is empty do not count against later ones.  It never exceeds what the first late request needs,
-- because this request is claimed next.  It is deleted when the late lane is empty.

-- Returns lane, id, prompt tokens, tenant and due time of the request to claim next; nil: no request waits.
-- `left_out`: as in turns.lua.
local function next_request(share, left_out)
  local id, tokens, tenant, due = head('on_time', left_out)
  if late_waits() then
    local credit = id and share > 0 and tonumber(call('GET', P .. 'late_credit') or 0) or 0
    if not id or credit > 0 then
      local late, size, other = head('late', left_out)
      if late and (not id or credit >= (1 - share) * size) then return 'late', late, size, other end
    end
  end
  if id then return 'on_time', id, tokens, tenant, due end
end

local function count_share(share, lane, tokens)  -- update the late lane's credit for prompt tokens claimed from `lane`
  if share == 0 then return end
  local key = P .. 'late_credit'
  if lane == 'late' then
    local credit = tonumber(call('GET', key) or 0) - (1 - share) * tokens
    if credit > 0 then call('SET', key, credit) else call('DEL', key) end
  elseif lane == 'on_time' and late_waits() then
    call('SET', key, (call('GET', key) or 0) + share * tokens)
  end
end
