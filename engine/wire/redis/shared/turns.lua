-- The next tenant of a lane, in a script that leaves some tenants out.
--
-- `left_out`: lane -> {names = {tenant = true}, count, front}; nil: no tenant is left out.  The first `front` tenants
-- of the lane are all in `names`.  So each search continues where the last one ended, and reads at most as many tenants
-- as are left out.  Counters only grow in such a script, so another tenant enters the first `front` places only in the
-- two cases of note_entry and note_turn.

local function leave_out(left_out, lane, tenant)  -- let next_tenant skip the tenant in this lane from now on
  local without = left_out[lane] or {names = {}, count = 0, front = 0}
  without.names[tenant], without.count = true, without.count + 1
  left_out[lane] = without
end

local function next_tenant(lane, left_out)  -- tenant with the smallest counter that is not left out; nil: none waits
  local turns, without = P .. 'turns:' .. lane, left_out and left_out[lane]
  if not without then return call('ZRANGE', turns, '0', '0')[1] end
  for at, tenant in ipairs(call('ZRANGE', turns, without.front, without.count)) do
    if not without.names[tenant] then
      without.front = without.front + at - 1
      return tenant
    end
  end
end

local function note_entry(left_out, lane)  -- a tenant has entered the lane, perhaps in the first `front` places
  if left_out and left_out[lane] then left_out[lane].front = 0 end
end

-- A request of the tenant was claimed from `lane`, so its counter grows and it moves back in both lanes.  In the other
-- lane it may leave the first `front` places, which another tenant then enters.
local function note_turn(left_out, lane, tenant)
  local other = lane == 'late' and 'on_time' or 'late'
  if left_out[other] and left_out[other].names[tenant] then left_out[other].front = 0 end
end
