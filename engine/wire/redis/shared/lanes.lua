-- Which lane an engine claims from next: the on-time lane, but for a guaranteed share of the late lane.
--
-- While both lanes wait, each claimed on-time token adds `share` to the late lane's credit, and each claimed late token
-- takes 1 - share.  Once the credit covers the first late request, that request is next.  So at least `share` of the
-- claimed prompt tokens are late ones.  The credit never falls below 0: what the late lane gets while the on-time lane
-- is empty is not held against it.  It grows no further than the first late request needs, because nothing else is
-- claimed from then on.  It ends with the late lane.

local function next_request(share)  -- id and prompt tokens of the request to claim next; nil: none waits
  local id, tokens = head('on_time')
  if not id then return head('late') end
  local credit = share > 0 and tonumber(call('GET', P .. 'late_credit') or 0) or 0
  if credit > 0 then
    local late, size = head('late')
    if late and credit >= (1 - share) * size then return late, size end
  end
  return id, tokens
end

local function count_share(share, lane, tokens)  -- prompt tokens were claimed from this lane
  if share == 0 then return end
  local key = P .. 'late_credit'
  if lane == 'late' then
    local credit = tonumber(call('GET', key) or 0) - (1 - share) * tokens
    if credit > 0 then call('SET', key, credit) else call('DEL', key) end
  elseif lane == 'on_time' and call('EXISTS', P .. 'turns:late') == 1 then
    call('SET', key, (call('GET', key) or 0) + share * tokens)
  end
end
