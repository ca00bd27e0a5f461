-- Prefix locality: which request of a tenant's window an engine claims, and which it leaves to another engine for a
-- moment.  "Locality" in KEYS.md.
--
-- Fairness and lanes pick the tenant.  Of the first WINDOW requests of its priority class:
--
--   passed over for too long? -- yes ---> claimed, in order
--   whose prefix is held longest? ------> would another engine with room begin it sooner?
--                                           no:  claimed
--                                           yes: left, for as long as that engine is ahead; then the next one is tried
--
-- After TRIES requests tried in vain an exchange claims in the queue's order.

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

-- An engine that publishes has claimed a request: from now on it counts as a holder of its prefixes, before it has
-- computed them.  `held`: digests that it has published already.
local function add_prefixes(engine, prefixes, held)
  each_part('SADD', P .. 'prefixes:' .. engine, string.sub(prefixes, held * DIGEST_BYTES + 1))
end

-- What an engine chooses with that publishes its prefixes: the functions choose, note_claim and note_passed, see below.
-- `me`: {name, token_us, step_us, backlog, tried}.  They keep `backlog` true, count in `tried` the requests that choose
-- tried in vain, and set `me.retry`: when the engine should ask again, unix ms.
local function chooser(me, now)
  local windows, fresh = {}, {}  -- of tenants in lanes; digests that the engine holds since its last choice
  local passed = {on_time = {}, late = {}}  -- ids that could have been claimed now, and were not
  local others  -- engines with room, once they are needed

  -- Of each request of a window: how many of its digests the engine holds.  Most prefixes are held nowhere, which the
  -- shortest one shows.  Then a binary search for all at once: an engine that holds a prefix holds the shorter ones.
  local function held_counts(engine, window)
    local key, prefixes, most, open = P .. 'prefixes:' .. engine, window.prefixes, {}, {}
    local counts = call('SMISMEMBER', key, unpack(window.shortest))
    for i = 1, #counts do
      if counts[i] == 1 then
        most[i] = #prefixes[i] / DIGEST_BYTES
        if most[i] > 1 then open[#open + 1] = i end
      end
    end
    while #open > 0 do
      local words, still = {}, {}
      for n, i in ipairs(open) do words[n] = prefix_digest(prefixes[i], math.ceil((counts[i] + most[i]) / 2)) end
      for n, found in ipairs(call('SMISMEMBER', key, unpack(words))) do
        local i = open[n]
        local at = math.ceil((counts[i] + most[i]) / 2)
        if found == 1 then counts[i] = at else most[i] = at - 1 end
        if counts[i] < most[i] then still[#still + 1] = i end
      end
      open = still
    end
    return counts
  end

  local function engines_with_room()  -- other engines that publish prefixes, live, heard of lately and with room
    local found, spare = {}, call('HGETALL', P .. 'spare')
    for i = 1, #spare, 2 do
      local left, heard, token_us, step_us, backlog = struct.unpack('<ddddd', spare[i + 1])
      if spare[i] ~= me.name and now - heard <= STALE_MS and token_us > 0
         and call('EXISTS', P .. 'lease:' .. spare[i]) == 1 then
        found[#found + 1] = {name = spare[i], room = left, token_us = token_us, step_us = step_us, backlog = backlog}
      end
    end
    return found
  end

  local function tokens_to_compute(request, held)  -- of the prompt, by an engine that holds so many of its digests
    return math.max(PREFIX_BLOCK, request.size - (held > 0 and prefix_tokens(held) or 0))
  end

  -- What an engine that holds `held` digests has to do for the request, in microseconds: its backlog, the prompt, and
  -- its pace for the first PACE_TOKENS tokens.  A token that it has to compute counts RECOMPUTE times, and the busier
  -- the engine is the more, since it delays whatever follows.
  local function start_cost(engine, request, held)
    local tokens = tokens_to_compute(request, held)
    local waited = RECOMPUTE * tokens + engine.backlog * (1 + tokens / request.size)
    return waited * engine.token_us + PACE_TOKENS * engine.step_us
  end

  -- The first requests of a tenant's queue, of the priority class of `first`, its head: {ids, prefixes, shortest,
  -- passed, held, skip}, each an array in their order, and `elsewhere`: engine -> what it holds of each.  nil where
  -- none has a prefix that could be held.
  local function read_window(lane, tenant, first)
    local queue = P .. 'queue:' .. lane .. ':' .. tenant
    local class = math.floor(call('ZSCORE', queue, first) / PLACES)
    local ids = call('ZRANGE', queue, '-inf', string.format('(%.0f', (class + 1) * PLACES), 'BYSCORE',
                     'LIMIT', 0, WINDOW)
    local prefixes, shortest, any = call('HMGET', P .. 'prefixes', unpack(ids)), {}, false
    for i = 1, #ids do
      local digests = prefixes[i] or ''
      prefixes[i], shortest[i], any = digests, string.sub(digests, 1, DIGEST_BYTES), any or digests ~= ''
    end
    if not any then return nil end
    local window = {ids = ids, prefixes = prefixes, shortest = shortest, skip = {}, elsewhere = {},
                    passed = call('HMGET', P .. 'passed', unpack(ids))}
    window.held = held_counts(me.name, window)
    return window
  end

  -- The place in a window of the request to claim: the first one that was passed over for too long, else the one of
  -- which the engine holds most; nil: none is left.
  local function next_place(window)
    local best, latest = nil, now .. ' ~'  -- `passed` begins with as many digits
    for at = 1, #window.ids do
      if not window.skip[at] then
        local before = window.passed[at]
        if before and before <= latest then return at, true end
        if not best or window.held[at] > window.held[best] then best = at end
      end
    end
    return best, false
  end

  -- The unix ms from which a request that is first passed over now goes first: it has waited as long again, at least
  -- the time to compute its prompt after the backlog, or on time PATIENCE_PERCENT of what it has left.
  local function patience_end(size, since, due)
    local patience = math.max(now - since, (size + me.backlog) * me.token_us / 1000)
    if due then patience = math.min(patience, PATIENCE_PERCENT / 100 * (due - now)) end
    return math.min(math.ceil(now + patience), now + MEMORY_MS)
  end

  -- Until when (unix ms) the engine leaves a request to another one, which has less to do for it; nil: it does not.  No
  -- longer than the other is ahead, nor than this engine would need for what it does not hold of the prompt.
  local function left_until(lane, window, at, request)
    if request.urgent or request.prefixes == '' or me.token_us == 0 then return nil end
    others = others or engines_with_room()
    if #others == 0 then return nil end
    local mine, ahead = start_cost(me, request, request.held), 0
    local most = tokens_to_compute(request, request.held) * me.token_us
    for _, other in ipairs(others) do
      if ahead >= most then break end
      if other.room >= request.size then
        -- Asked once for the whole window: with many engines, one request at a time is what a claim would cost.
        local held = window.elsewhere[other.name] or held_counts(other.name, window)
        window.elsewhere[other.name] = held
        ahead = math.max(ahead, mine - start_cost(other, request, held[at]))
      end
    end
    if ahead == 0 then return nil end
    ahead = math.min(ahead, most)
    local latest, since = string.match(request.passed or '', '^(%d+) (%d+)$')
    local age = latest or call('ZSCORE', P .. 'ages:' .. lane, request.id)
    latest = latest or patience_end(request.size, age, request.due)
    local limit = math.min((since or now) + ahead / 1000, latest)
    return limit > now and limit or nil
  end

  -- The request that the engine claims next of a tenant's window, with room for `most` tokens; nil: it leaves them all.
  -- `first`: the head of the queue, which fits: {id, size, due}.
  local function choose(lane, tenant, first, most)
    if me.tried >= TRIES then return {id = first.id, size = first.size, held = 0} end
    if next(fresh) then  -- requests of the windows whose prefix has been claimed since count as held
      for _, window in pairs(windows) do
        for at, prefixes in ipairs(window.prefixes) do
          while fresh[prefix_digest(prefixes, window.held[at] + 1)] do window.held[at] = window.held[at] + 1 end
        end
      end
      fresh = {}
    end
    local key = lane .. ' ' .. tenant
    local window = windows[key] or read_window(lane, tenant, first.id)
    if not window then return {id = first.id, size = first.size, held = 0} end
    windows[key] = window
    while true do
      local at, urgent = next_place(window)
      if not at and window.claimed then  -- more may wait behind it
        windows[key] = nil
        return choose(lane, tenant, first, most)
      elseif not at then
        return nil
      end
      me.tried = me.tried + 1
      local id, size, due = window.ids[at], first.size, first.due
      if id ~= first.id then size, due = claimable(id, now) end
      window.skip[at] = true
      if size and size <= most and (lane == 'late' or not due or due > now or id == first.id) then
        local request = {id = id, size = size, due = lane == 'on_time' and due, prefixes = window.prefixes[at],
                         held = window.held[at], passed = window.passed[at], urgent = urgent}
        local limit = left_until(lane, window, at, request)
        if limit then
          me.retry = math.min(me.retry or limit, limit)
          if not request.passed then passed[lane][id] = true end
        else
          for i = 1, at - 1 do
            if not window.skip[i] and not window.passed[i] then passed[lane][window.ids[i]] = true end
          end
          window.claimed = true
          me.tried = me.tried - 1
          return request
        end
      elseif urgent and size and size > most then
        return {id = id, size = size, held = 0}  -- it does not fit, which ends the claim
      end
    end
  end

  -- The engine has claimed a request that it chose: others with the same prefix count as held from now on.
  local function note_claim(lane, request)
    me.backlog = me.backlog + math.max(0, request.size - (request.held > 0 and prefix_tokens(request.held) or 0))
    passed[lane][request.id] = nil
    local prefixes = request.prefixes or ''
    for at = request.held + 1, #prefixes / DIGEST_BYTES do fresh[prefix_digest(prefixes, at)] = true end
  end

  local function note_some(lane, ids)  -- enter them in `passed`
    local entries = call('HMGET', P .. 'waiting', unpack(ids))
    local ages = call('ZMSCORE', P .. 'ages:' .. lane, unpack(ids))
    local dues = lane == 'on_time' and call('ZMSCORE', P .. 'due', unpack(ids)) or {}
    local words = {}
    for i, id in ipairs(ids) do
      if entries[i] then
        local size, due = tonumber(string.match(entries[i], '^%d+')), tonumber(dues[i] or nil)
        words[#words + 1] = id
        words[#words + 1] = patience_end(size, ages[i], due) .. ' ' .. now
      end
    end
    if #words > 0 then
      -- Redis keeps a small hash as a list, and would search it from its start for each request of a window.  A name
      -- of more than 64 bytes ends that.
      local long = string.rep('-', 65)
      call('HSET', P .. 'passed', long, '', unpack(words))
      call('HDEL', P .. 'passed', long)
    end
  end

  local function note_passed()  -- requests that could have been claimed now, and were not
    for lane, found in pairs(passed) do
      local ids = {}
      for id in pairs(found) do
        ids[#ids + 1] = id
        if #ids == 1000 then  -- a command takes no more than thousands of arguments
          note_some(lane, ids)
          ids = {}
        end
      end
      if #ids > 0 then note_some(lane, ids) end
    end
  end

  return choose, note_claim, note_passed
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
