-- Prefix locality: which request of a tenant's window an engine claims, and which it leaves to another engine for a
-- moment.  "Locality" in KEYS.md.
--
-- Fairness and lanes pick the tenant.  Of the first WINDOW requests of its priority class:
--
--   passed over for too long? -- yes ---> claimed, in order
--   whose prefix is held longest? ------> would another engine with room begin it sooner?
--                                           no:  claimed
--                                           yes: left, for as long as that engine is ahead; then the next one is tried

local function prefix_tokens(count)  -- tokens of the `count`-th length at which prefixes have digests
  if count <= PREFIX_DENSE then return count * PREFIX_BLOCK end
  local beyond = count - PREFIX_DENSE - 1
  local step = PREFIX_DENSE / PREFIX_STEPS
  return (PREFIX_DENSE + step * (beyond % PREFIX_STEPS + 1)) * 2 ^ math.floor(beyond / PREFIX_STEPS) * PREFIX_BLOCK
end

local function prefix_digest(digests, at)
  return string.sub(digests, (at - 1) * DIGEST_BYTES + 1, at * DIGEST_BYTES)
end

local function each_part(command, key, digests)  -- run a command on a key with all digests, some at a time
  local words = {}
  for at = 1, #digests / DIGEST_BYTES do
    words[#words + 1] = prefix_digest(digests, at)
    if #words == 1000 then
      call(command, key, unpack(words))
      words = {}
    end
  end
  if #words > 0 then call(command, key, unpack(words)) end
end

-- Of each of these strings of digests, shortest prefix first: how many the engine holds.  A binary search for all at
-- once, since an engine that holds a prefix holds the shorter ones.
local function held_counts(engine, prefixes)
  local key, counts, most, open = P .. 'prefixes:' .. engine, {}, {}, {}
  for i, digests in ipairs(prefixes) do
    counts[i], most[i] = 0, #digests / DIGEST_BYTES
    if most[i] > 0 then open[#open + 1] = i end
  end
  local first = true  -- most prefixes are held nowhere, which the shortest one shows
  while #open > 0 do
    local words, at, still = {}, {}, {}
    for n, i in ipairs(open) do
      at[n] = first and 1 or math.ceil((counts[i] + most[i]) / 2)
      words[n] = prefix_digest(prefixes[i], at[n])
    end
    for n, found in ipairs(call('SMISMEMBER', key, unpack(words))) do
      local i = open[n]
      if found == 1 then counts[i] = at[n] else most[i] = at[n] - 1 end
      if counts[i] < most[i] then still[#still + 1] = i end
    end
    open, first = still, false
  end
  return counts
end

local function engines_with_room(me, now)  -- other engines that publish prefixes, live, heard of lately and with room
  local found, spare = {}, call('HGETALL', P .. 'spare')
  for i = 1, #spare, 2 do
    local left, heard, token_us, step_us, backlog = struct.unpack('<ddddd', spare[i + 1])
    if spare[i] ~= me and now - heard <= STALE_MS and token_us > 0
       and call('EXISTS', P .. 'lease:' .. spare[i]) == 1 then
      found[#found + 1] = {name = spare[i], room = left, token_us = token_us, step_us = step_us, backlog = backlog}
    end
  end
  return found
end

local function tokens_to_compute(request, held)  -- of the prompt, by an engine that holds so many of its digests
  return math.max(PREFIX_BLOCK, request.size - (held > 0 and prefix_tokens(held) or 0))
end

-- What an engine that holds `held` digests has to do for the request, in microseconds: its backlog, the prompt, and its
-- pace for the first PACE_TOKENS tokens.  A token that it has to compute counts RECOMPUTE times, and the busier the
-- engine is the more, since it delays whatever follows.
local function start_cost(engine, request, held)
  local tokens = tokens_to_compute(request, held)
  local waited = RECOMPUTE * tokens + engine.backlog * (1 + tokens / request.size)
  return waited * engine.token_us + PACE_TOKENS * engine.step_us
end

-- The first requests of a tenant's queue, of the priority class of its head: {ids, prefixes, passed, held, skip}, each
-- an array in their order, and `elsewhere`: engine -> what it holds of each.  nil where none has a prefix that could be
-- held.
local function read_window(me, lane, tenant)
  local found = call('ZRANGE', P .. 'queue:' .. lane .. ':' .. tenant, 0, WINDOW - 1, 'WITHSCORES')
  local ids, class = {}, math.floor(found[2] / PLACES)
  for i = 1, #found, 2 do
    if math.floor(found[i + 1] / PLACES) > class then break end
    ids[#ids + 1] = found[i]
  end
  local prefixes, any = call('HMGET', P .. 'prefixes', unpack(ids)), false
  for i = 1, #ids do
    any = any or prefixes[i]
    prefixes[i] = prefixes[i] or ''
  end
  if not any then return nil end
  return {ids = ids, prefixes = prefixes, passed = call('HMGET', P .. 'passed', unpack(ids)),
          held = held_counts(me.name, prefixes), skip = {}, elsewhere = {}}
end

-- How many digests of the request at this place another engine holds.  Asked once for the whole window: with many
-- engines, asking for one request at a time is what a claim would cost.
local function held_elsewhere(window, at, name)
  window.elsewhere[name] = window.elsewhere[name] or held_counts(name, window.prefixes)
  return window.elsewhere[name][at]
end

-- The place in a window of the request to claim: the first one that was passed over for too long, else the one of
-- which the engine holds most; nil: none is left.
local function next_place(window, now)
  local best, latest = nil, now .. ' ~'  -- `passed` begins with as many digits
  for at = 1, #window.ids do
    if not window.skip[at] then
      local passed = window.passed[at]
      if passed and passed <= latest then return at, true end
      if not best or window.held[at] > window.held[best] then best = at end
    end
  end
  return best, false
end

-- The unix ms from which a request that is first passed over now goes first: it has waited as long again, at least the
-- time to compute its prompt after the backlog, or on time PATIENCE_PERCENT of what it has left.
local function patience_end(me, size, since, due, now)
  local patience = math.max(now - since, (size + me.backlog) * me.token_us / 1000)
  if due then patience = math.min(patience, PATIENCE_PERCENT / 100 * (due - now)) end
  return math.min(math.ceil(now + patience), now + MEMORY_MS)
end

-- Until when (unix ms) the engine leaves a request to another one, which has less to do for it; nil: it does not.  No
-- longer than the other is ahead, nor than this engine would need for what it does not hold of the prompt.
local function left_until(me, lane, window, at, request, now)
  if request.urgent or request.prefixes == '' or me.token_us == 0 then return nil end
  me.others = me.others or engines_with_room(me.name, now)
  if #me.others == 0 then return nil end
  local mine, ahead = start_cost(me, request, request.held), 0
  local most = tokens_to_compute(request, request.held) * me.token_us
  for _, other in ipairs(me.others) do
    if ahead >= most then break end
    if other.room >= request.size then
      ahead = math.max(ahead, mine - start_cost(other, request, held_elsewhere(window, at, other.name)))
    end
  end
  if ahead == 0 then return nil end
  ahead = math.min(ahead, most)
  local latest, since = string.match(request.passed or '', '^(%d+) (%d+)$')
  local age = latest or call('ZSCORE', P .. 'ages:' .. lane, request.id)
  latest = latest or patience_end(me, request.size, age, request.due, now)
  local limit = math.min((since or now) + ahead / 1000, latest)
  return limit > now and limit or nil
end

-- The request that the engine claims next of a tenant's window, with room for `most` tokens; nil: it leaves them all.
-- `first`: the head of the queue, which fits.
-- `me`: {name, token_us, step_us, backlog, windows, passed}; `me.retry`: when it should ask again, unix ms.
local function choose(me, lane, tenant, first, most, now)
  local key = lane .. ' ' .. tenant
  local window = me.windows[key] or read_window(me, lane, tenant)
  if not window then return {id = first.id, size = first.size, prefixes = '', held = 0} end
  me.windows[key] = window
  while true do
    local at, urgent = next_place(window, now)
    if not at and window.claimed then  -- more may wait behind it
      me.windows[key] = nil
      return choose(me, lane, tenant, first, most, now)
    elseif not at then
      return nil
    end
    local id = window.ids[at]
    local size, due = claimable(id, now)
    window.skip[at] = true
    if size and size <= most and (lane == 'late' or not due or due > now or id == first.id) then
      local request = {id = id, size = size, due = lane == 'on_time' and due, prefixes = window.prefixes[at],
                       held = window.held[at], passed = window.passed[at], urgent = urgent}
      local limit = left_until(me, lane, window, at, request, now)
      if limit then
        me.retry = math.min(me.retry or limit, limit)
        if not request.passed then me.passed[lane][id] = true end
      else
        for i = 1, at - 1 do
          if not window.skip[i] and not window.passed[i] then me.passed[lane][window.ids[i]] = true end
        end
        window.claimed = true
        return request
      end
    elseif urgent and size and size > most then
      return {id = id, size = size, prefixes = '', held = 0}  -- it does not fit, which ends the claim
    end
  end
end

-- An engine that publishes has claimed a request: from now on it counts as a holder of its prefixes, before it has
-- computed them.  `held`: digests that it has published already.
local function add_prefixes(engine, prefixes, held)
  each_part('SADD', P .. 'prefixes:' .. engine, string.sub(prefixes, held * DIGEST_BYTES + 1))
end

-- The engine has claimed a request of a window: requests with the same prefix count as held from now on.
local function note_claim(me, lane, request)
  local count, fresh = #request.prefixes / DIGEST_BYTES, {}
  me.backlog = me.backlog + math.max(0, request.size - (request.held > 0 and prefix_tokens(request.held) or 0))
  me.passed[lane][request.id] = nil
  if request.held == count then return end
  for at = request.held + 1, count do fresh[prefix_digest(request.prefixes, at)] = true end
  for _, window in pairs(me.windows) do
    for at, prefixes in ipairs(window.prefixes) do
      while fresh[prefix_digest(prefixes, window.held[at] + 1)] do window.held[at] = window.held[at] + 1 end
    end
  end
end

local function note_passed(me, now)  -- these requests could have been claimed now, and were not
  for lane, passed in pairs(me.passed) do
    local ids, words = {}, {}
    for id in pairs(passed) do ids[#ids + 1] = id end
    if #ids > 0 then
      local entries = call('HMGET', P .. 'waiting', unpack(ids))
      local ages = call('ZMSCORE', P .. 'ages:' .. lane, unpack(ids))
      local dues = lane == 'on_time' and call('ZMSCORE', P .. 'due', unpack(ids)) or {}
      for i, id in ipairs(ids) do
        if entries[i] then
          local size, due = tonumber(string.match(entries[i], '^%d+')), tonumber(dues[i] or nil)
          words[#words + 1] = id
          words[#words + 1] = patience_end(me, size, ages[i], due, now) .. ' ' .. now
        end
      end
      if #words > 0 then call('HSET', P .. 'passed', unpack(words)) end
    end
  end
end

local function sweep_prefixes()  -- remove what a process of an earlier release left behind when it took a request
  local waiting = call('HLEN', P .. 'waiting')
  for _, key in ipairs({P .. 'prefixes', P .. 'passed'}) do
    if call('HLEN', key) > waiting then
      for _, id in ipairs(call('HKEYS', key)) do
        if call('HEXISTS', P .. 'waiting', id) == 0 then call('HDEL', key, id) end
      end
    end
  end
end
