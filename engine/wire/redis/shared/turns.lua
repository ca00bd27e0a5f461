-- Whose turn it is in a lane, where a script leaves tenants out.
--
-- `left_out`: lane -> {names = {tenant = true}, count, front}; nil: none is left out.  The first `front` tenants of the
-- lane are known to be among `names`.  So a walk continues where the last one ended, and reads no more tenants than may
-- be left out.  Counters only grow in a script that leaves tenants out, so others do not enter the first `front` but in
-- the two cases below.

local function leave_out(left_out, lane, tenant)  -- from now on next_tenant passes over the tenant in this lane
  local without = left_out[lane] or {names = {}, count = 0, front = 0}
  without.names[tenant], without.count = true, without.count + 1
  left_out[lane] = without
end

local function next_tenant(lane, left_out)  -- nil: none waits
  local turns, without = P .. 'turns:' .. lane, left_out and left_out[lane]
  if not without then return call('ZRANGE', turns, '0', '0')[1] end
  for at, tenant in ipairs(call('ZRANGE', turns, without.front, without.count)) do
    if not without.names[tenant] then
      without.front = without.front + at - 1
      return tenant
    end
  end
end

local function note_entry(left_out, lane)  -- a tenant has entered the lane, perhaps in front
  if left_out and left_out[lane] then left_out[lane].front = 0 end
end

-- A request of the tenant was claimed from `lane`, which moves it behind others in both.  In the other lane it may be
-- one of those in front.
local function note_turn(left_out, lane, tenant)
  local other = lane == 'late' and 'on_time' or 'late'
  if left_out[other] and left_out[other].names[tenant] then left_out[other].front = 0 end
end
