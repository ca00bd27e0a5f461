-- Prefix locality: which request of a tenant's window an engine claims, and which it leaves to another engine for a
-- moment.  "Locality" in KEYS.md.
--
-- Fairness and lanes pick the tenant.  Of the first WINDOW requests of its priority class:
--
--   passed over too often? ---- yes ----> claimed, in order
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

-- Microseconds until an engine that holds `held` digests of the request would have computed its prompt, and what its
-- pace adds to the first PACE_TOKENS tokens.
local function start_cost(engine, request, held)
  local tokens = request.size - (held > 0 and prefix_tokens(held) or 0)
  return (math.max(0, tokens) + engine.backlog) * engine.token_us + PACE_TOKENS * engine.step_us
end

-- The first requests of a tenant's queue, of the priority class of its head, as {id, size, prefixes, held, ...}; each
-- may be claimed.  nil where none has a prefix that could be held.
local function read_window(me, lane, tenant, now)
  local queue = P .. 'queue:' .. lane .. ':' .. tenant
  local first = call('ZRANGE', queue, 0, 0, 'WITHSCORES')
  local last = string.format('(%.0f', (math.floor(first[2] / PLACES) + 1) * PLACES)
  local ids = call('ZRANGEBYSCORE', queue, '-inf', last, 'LIMIT', 0, WINDOW)
  local prefixes, any = call('HMGET', P .. 'prefixes', unpack(ids)), false
  for i = 1, #ids do
    any = any or prefixes[i]
    prefixes[i] = prefixes[i] or ''
  end
  if not any then return nil end
  local entries, passed = call('HMGET', P .. 'waiting', unpack(ids)), call('HMGET', P .. 'passed', unpack(ids))
  local dues = lane == 'on_time' and call('ZMSCORE', P .. 'due', unpack(ids)) or {}
  local counts, window = held_counts(me.name, prefixes), {}
  for i, id in ipairs(ids) do
    local since, claims = string.match(passed[i] or '', '^(%d+) (%d+)$')
    local due = tonumber(dues[i] or nil)
    local late = since and due and now >= (since + due) / 2  -- half of the time that it had left
    if not due or due > now then
      window[#window + 1] = {
        id = id, size = tonumber(string.match(entries[i], '^%d+')), prefixes = prefixes[i], held = counts[i],
        due = due, since = tonumber(since),
        urgent = late or since and me.claims - claims >= OVERTAKEN * me.engines,
      }
    end
  end
  return window
end

-- Until when (unix ms) the engine leaves a request to another one, which would begin it sooner; nil: it does not.  No
-- longer than the other is ahead: then the request has lost nothing.
local function left_until(me, request, now)
  if request.urgent or request.prefixes == '' or me.token_us == 0 then return nil end
  me.others = me.others or engines_with_room(me.name, now)
  local mine, latest = start_cost(me, request, request.held), nil
  for _, other in ipairs(me.others) do
    if other.room >= request.size then
      local held = held_counts(other.name, {request.prefixes})[1]
      local limit = (request.since or now) + (mine - start_cost(other, request, held)) / 1000
      if request.due then limit = math.min(limit, request.due) end
      if limit > now and (not latest or limit > latest) then latest = limit end
    end
  end
  return latest
end

-- The request that the engine claims next of a tenant's window, with room for `most` tokens; nil: it leaves them all.
-- `first`: the head of the queue, which fits.
-- `me`: {name, token_us, step_us, backlog, claims, engines, windows}; `me.retry`: when it should ask again, unix ms.
local function choose(me, lane, tenant, first, most, now)
  local key = lane .. ' ' .. tenant
  local window = me.windows[key]
  if not window or #window == 0 then
    window = read_window(me, lane, tenant, now)
    if not window then return {id = first.id, size = first.size, prefixes = '', held = 0} end
    me.windows[key] = window
  end
  while true do
    local best, at
    for i, request in ipairs(window) do
      if request.urgent then best, at = request, i break end
      if not request.left and request.size <= most and (not best or request.held > best.held) then
        best, at = request, i
      end
    end
    if not best then return nil end
    local limit = left_until(me, best, now)
    if not limit then
      for i = 1, at - 1 do me.passed[window[i].id] = not window[i].since or nil end
      table.remove(window, at)
      return best
    end
    best.left = true
    me.passed[best.id] = not best.since or nil
    me.retry = math.min(me.retry or limit, limit)
  end
end

-- The engine has claimed a request: from now on it counts as a holder of its prefixes, before it has computed them.
local function note_claim(me, request)
  local count, fresh = #request.prefixes / DIGEST_BYTES, {}
  me.backlog = me.backlog + math.max(0, request.size - (request.held > 0 and prefix_tokens(request.held) or 0))
  me.passed[request.id] = nil
  if request.held == count then return end
  for at = request.held + 1, count do fresh[prefix_digest(request.prefixes, at)] = true end
  each_part('SADD', P .. 'prefixes:' .. me.name, string.sub(request.prefixes, request.held * DIGEST_BYTES + 1))
  for _, window in pairs(me.windows) do
    for _, other in ipairs(window) do
      while fresh[prefix_digest(other.prefixes, other.held + 1)] do other.held = other.held + 1 end
    end
  end
end

local function note_passed(me, now)  -- these requests could have been claimed now, and others were
  local words = {}
  for id in pairs(me.passed) do
    words[#words + 1] = id
    words[#words + 1] = now .. ' ' .. me.claims
  end
  if #words > 0 then call('HSET', P .. 'passed', unpack(words)) end
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
