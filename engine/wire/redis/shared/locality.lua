-- Prefix locality: which request of a tenant's window an engine claims, and which it leaves to another engine for a
-- moment.  "Locality" in KEYS.md.
--
-- Fairness and lanes pick the tenant.  Of the first WINDOW requests of its priority class:
--
--   passed over for too long? -- yes ---> claimed, in order
--   whose prefix is held longest? ------> would another engine with free capacity begin it sooner?
--                                           no:  claimed
--                                           yes: left, for as long as that engine is ahead; then the next one is tried
--
-- After TRIES requests tried in vain a sync claims in the queue's order.

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
    if #words == COMMAND_WORDS then
      call(command, key, unpack(words))
      words = {}
    end
  end
  if #words > 0 then call(command, key, unpack(words)) end
end

-- An engine that publishes has claimed a request: from now on it counts as a holder of its prefixes, before it has
-- computed them, and of its adapter.  `held`: digests of prefixes that it has published already.
local function add_prefixes(engine, prefixes, held)
  local adapter, digests = split_adapter(prefixes)
  each_part('SADD', P .. 'prefixes:' .. engine, adapter .. string.sub(digests, held * DIGEST_BYTES + 1))
end

-- How an engine that publishes its prefixes claims.  Returns three functions: a sync calls choose for the tenant
-- whose turn it is, note_claim after each claim, and finish once at the end.
-- `me`: {name, token_us, step_us, backlog, load_us, loads, publishes, lacking} of the engine; load_us: until it has
-- loaded one more adapter; loads: adapters that it loads or has still to load; lacking: whether any engine lacks an
-- adapter.  `now`: unix ms.
--
-- They are made here, not among the shared functions: only claims by prefix pay for making them (scripts.py).
local function chooser(me, now)
  -- The claim so far:
  --   windows      'LANE TENANT' -> what read_window has found
  --   new_digests  digest -> true, of what the engine has claimed since its last choice; adapters too
  --   adapters     whether a request of a window needs an adapter
  --   passed_over  lane -> {id = true}, requests that the engine could have claimed and has not
  --   tried        requests that choose has tried in vain
  --   retry_at     unix ms at which the engine should ask again; nil: it has left no request
  --   left_to      engines to which it has left a request now, and not before: finish wakes them
  --   backlog      prompt tokens that it has still to compute, with those of its claims
  --   loads        adapters that it has still to load, with those of its claims
  --   others       what engines_with_room has found; nil until it is needed
  local so_far = {windows = {}, new_digests = {}, adapters = false, passed_over = {on_time = {}, late = {}}, tried = 0,
                  left_to = {}, backlog = me.backlog, loads = me.loads}

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

  -- For each request in the window: whether it needs an adapter that the engine does not hold.
  local function lacking_adapters(engine, window)
    local words, places, lacks = {}, {}, {}
    if not me.publishes then return lacks end
    for at, adapter in ipairs(window.adapters) do
      if adapter ~= '' then
        words[#words + 1] = adapter
        places[#words] = at
      end
    end
    if #words == 0 then return lacks end
    for n, found in ipairs(call('SMISMEMBER', P .. 'prefixes:' .. engine, unpack(words))) do
      lacks[places[n]] = found == 0
    end
    return lacks
  end

  local function engines_with_room()  -- other live engines that publish prefixes, with free capacity and a recent sync
    local found, spare = {}, call('HGETALL', P .. 'spare')
    for i = 1, #spare, 2 do
      local left, heard, token_us, step_us, backlog = struct.unpack('<ddddd', spare[i + 1])
      if spare[i] ~= me.name and now - heard <= STALE_MS and token_us > 0
         and call('EXISTS', P .. 'lease:' .. spare[i]) == 1 then
        local load_us = #spare[i + 1] > 40 and struct.unpack('<d', spare[i + 1], 41) or 0  -- an earlier release: none
        found[#found + 1] = {name = spare[i], room = left, token_us = token_us, step_us = step_us, backlog = backlog,
                             load_us = load_us}
      end
    end
    return found
  end

  local function tokens_to_compute(size, held)  -- cost of a prompt for an engine that holds `held` of its digests
    return math.max(PREFIX_BLOCK, size - (held > 0 and prefix_tokens(held) or 0))
  end

  -- What an engine that holds `held` digests has to do for a prompt of `size` tokens, in microseconds: its backlog, the
  -- prompt, and its pace for the first PACE_TOKENS tokens.  A token that it has to compute counts RECOMPUTE times, and
  -- the busier the engine is the more, since it delays whatever follows.  `lacks`: it has to load the adapter.
  local function start_cost(engine, backlog, size, held, lacks)
    local tokens = tokens_to_compute(size, held)
    local waited = RECOMPUTE * tokens + backlog * (1 + tokens / size)
    return waited * engine.token_us + PACE_TOKENS * engine.step_us + (lacks and engine.load_us or 0)
  end

  -- The requests of a tenant's queue behind the first `after`, of the priority class of `first`, its head.  Arrays in
  -- their order: ids; prefixes: their digests; shortest: the first digest of each; entries: what `passed` has of
  -- them, or false; held: how many digests the engine holds; adapters: digest of the adapter, or ''; lacks: whether the
  -- engine does not hold it; left: whether it lacks its files; done: true once tried or claimed.
  -- elsewhere: engine -> {held, lacks, left} of that one.  all_left: whether the engine lacks the files of all.
  -- nil if there is none, or none of the first ones has a prefix or adapter that could be held.
  local function read_window(lane, tenant, first, after)
    local queue = P .. 'queue:' .. lane .. ':' .. tenant
    local class = math.floor(call('ZSCORE', queue, first) / PLACES)
    local ids = call('ZRANGE', queue, '-inf', string.format('(%.0f', (class + 1) * PLACES), 'BYSCORE',
                     'LIMIT', after, WINDOW)
    if #ids == 0 then return nil end
    local prefixes, adapters, shortest, any = call('HMGET', P .. 'prefixes', unpack(ids)), {}, {}, false
    for i = 1, #ids do
      local adapter, digests = split_adapter(prefixes[i] or '')
      prefixes[i], adapters[i], shortest[i] = digests, adapter, string.sub(digests, 1, DIGEST_BYTES)
      any, so_far.adapters = any or digests ~= '' or adapter ~= '', so_far.adapters or adapter ~= ''
    end
    if not any and after == 0 then return nil end
    local window = {ids = ids, prefixes = prefixes, adapters = adapters, shortest = shortest, done = {}, elsewhere = {},
                    entries = call('HMGET', P .. 'passed', unpack(ids))}
    window.held, window.lacks = held_counts(me.name, window), lacking_adapters(me.name, window)
    window.left = me.lacking and lacked_of(me.name, adapters) or {}
    local left = 0
    for _ in pairs(window.left) do left = left + 1 end
    window.after, window.all_left = after, left == #ids
    return window
  end

  -- Entries of `passed` are 'UNTIL MS', with as many digits as `now`: as texts they are in the order of UNTIL.  Making
  -- numbers of all entries of a window would take Redis as long as several commands.
  local last_overdue = now .. ' ~'

  -- The place in a window of the request to try next, and whether it goes first because it was passed over for too
  -- long: the first such request, else the one of which the engine holds most, those without its adapter last; nil: all
  -- are done.
  local function next_place(window)
    local best, most
    for at = 1, #window.ids do
      if not window.done[at] then
        local entry = window.entries[at]
        if entry and entry <= last_overdue then return at, true end
        local held = window.held[at] - (window.lacks[at] and PREFIX_COUNT + 1 or 0)
        if not best or held > most then best, most = at, held end
      end
    end
    return best, false
  end

  -- The unix ms from which a request that is first passed over now goes first: it has waited as long again, at least
  -- the time to compute its prompt after the backlog, or on time PATIENCE_PERCENT of what it has left.
  -- One that needs an adapter waits LOADS_PASSED loads at most: a rarely used adapter does not starve.
  -- `submitted`, `due`: unix ms; `due`: nil in the late lane.
  local function patience_end(size, submitted, due, adapted)
    local patience = math.max(now - submitted, (size + so_far.backlog) * me.token_us / 1000)
    if adapted and me.load_us > 0 then patience = math.min(patience, LOADS_PASSED * me.load_us / 1000) end
    if due then patience = math.min(patience, PATIENCE_PERCENT / 100 * (due - now)) end
    return math.min(math.ceil(now + patience), now + MEMORY_MS)
  end

  -- Microseconds by which another engine with free capacity is ahead for a request of a window; 0: none is ahead.  At
  -- most what this engine would need for what it does not hold of the prompt.  And the name of the other engine.
  local function time_ahead(window, at, size)
    local held, lacks = window.held[at], window.lacks[at]
    local mine, ahead, name = start_cost(me, so_far.backlog, size, held, lacks), 0, nil
    local most = tokens_to_compute(size, held) * me.token_us + (lacks and me.load_us or 0)
    for _, other in ipairs(so_far.others) do
      if ahead >= most then break end
      if other.room >= size then
        -- Asked once for the complete window: with many engines, one request at a time is what a claim would cost.
        local theirs = window.elsewhere[other.name]
                       or {held = held_counts(other.name, window), lacks = lacking_adapters(other.name, window),
                           left = me.lacking and lacked_of(other.name, window.adapters) or {}}
        window.elsewhere[other.name] = theirs
        local by = mine - start_cost(other, other.backlog, size, theirs.held[at], theirs.lacks[at])
        if by > ahead and not theirs.left[at] then ahead, name = by, other.name end
      end
    end
    return math.min(ahead, most), name
  end

  -- Until when (unix ms) the engine leaves a request of a window to another one; nil: it does not.
  local function left_until(lane, window, at, size, due)
    local adapted = window.adapters[at] ~= ''
    if window.prefixes[at] == '' and not adapted or me.token_us == 0 then return nil end
    so_far.others = so_far.others or engines_with_room()
    if #so_far.others == 0 then return nil end
    local ahead, name = time_ahead(window, at, size)
    if ahead == 0 then return nil end
    local goes_first, since = string.match(window.entries[at] or '', '^(%d+) (%d+)$')
    if goes_first then
      goes_first, since = tonumber(goes_first), tonumber(since)
    else
      since = now
      goes_first = patience_end(size, tonumber(call('ZSCORE', P .. 'ages:' .. lane, window.ids[at])), due, adapted)
    end
    local limit = math.min(since + ahead / 1000, goes_first)
    if limit <= now then return nil end
    if since == now then so_far.left_to[name] = true end
    return limit
  end

  local function hold_new_digests()  -- requests of the windows whose prefix has been claimed since count as held
    if not next(so_far.new_digests) then return end
    for _, window in pairs(so_far.windows) do
      for at, prefixes in ipairs(window.prefixes) do
        if so_far.new_digests[window.adapters[at]] then window.lacks[at] = false end
        while so_far.new_digests[prefix_digest(prefixes, window.held[at] + 1)] do
          window.held[at] = window.held[at] + 1
        end
      end
    end
    so_far.new_digests = {}
  end

  -- The request of a window that the engine claims next, see choose; nil: it leaves all that are not done.
  local function choose_of(window, lane, first, most)
    local passed_over = so_far.passed_over[lane]
    while true do
      local at, urgent = next_place(window)
      if not at then return nil end
      window.done[at] = true
      so_far.tried = so_far.tried + 1
      local id, size, due = window.ids[at], first.size, first.due
      if id ~= first.id then size, due = claimable(id, now) end
      local in_lane = lane == 'late' or not due or due > now or id == first.id
      -- It would wait here for other loads, while another engine may have its adapter, or be free to load it.
      local waits, left = window.lacks[at] and so_far.loads >= MOST_LOADS, window.left[at]
      if size and size <= most and in_lane and not waits and not left then
        local limit = not urgent and left_until(lane, window, at, size, lane == 'on_time' and due or nil)
        if not limit then
          for i = 1, at - 1 do
            if not window.done[i] and not window.entries[i] then passed_over[window.ids[i]] = true end
          end
          window.claims = true
          so_far.tried = so_far.tried - 1
          return {id = id, size = size, prefixes = window.prefixes[at], adapter = window.adapters[at],
                  lacks = window.lacks[at], held = window.held[at], waited = window.entries[at] ~= false}
        end
        so_far.retry_at = math.min(so_far.retry_at or limit, limit)
        if not window.entries[at] then passed_over[id] = true end
      elseif urgent and size and size > most and not left then
        return {id = id, size = size, prefixes = '', held = 0}  -- it does not fit, which ends the claim
      end
    end
  end

  -- The request that the engine claims next of a tenant's queue: {id, size, prefixes, held: how many of its digests the
  -- engine holds, waited: whether it was passed over before}; nil: the engine leaves the tenant's requests.
  -- `first`: the head of the queue, which fits: {id, size, due}.  `most`: the engine's free capacity, prompt tokens.
  local function choose(lane, tenant, first, most)
    hold_new_digests()
    local key = lane .. ' ' .. tenant
    while so_far.tried < TRIES do
      local window = so_far.windows[key] or read_window(lane, tenant, first.id, 0)
      if not window then break end
      so_far.windows[key] = window
      local request = choose_of(window, lane, first, most)
      if request then return request end
      if window.claims then
        so_far.windows[key] = nil  -- more may wait behind a window of which it has claimed some
      else
        local further = window.all_left and read_window(lane, tenant, first.id, window.after + WINDOW)
        if not further then return nil end
        so_far.windows[key] = further
      end
    end
    if me.lacking and lacked_of(me.name, {adapter_of(first.id)})[1] then return nil end
    return {id = first.id, size = first.size, prefixes = '', held = 0}
  end

  local function note_claim(lane, request)  -- the engine has claimed what choose has returned
    so_far.backlog = so_far.backlog
                     + math.max(0, request.size - (request.held > 0 and prefix_tokens(request.held) or 0))
    so_far.passed_over[lane][request.id] = nil
    if request.lacks then so_far.new_digests[request.adapter], so_far.loads = true, so_far.loads + 1 end
    for at = request.held + 1, #request.prefixes / DIGEST_BYTES do
      so_far.new_digests[prefix_digest(request.prefixes, at)] = true
    end
  end

  local function note_passed_over(lane, ids)  -- enter them in the hash `passed`
    local waiting = call('HMGET', P .. 'waiting', unpack(ids))
    local submitted = call('ZMSCORE', P .. 'ages:' .. lane, unpack(ids))
    local dues = lane == 'on_time' and call('ZMSCORE', P .. 'due', unpack(ids)) or {}
    local prefixes = so_far.adapters and call('HMGET', P .. 'prefixes', unpack(ids)) or {}
    local words = {}
    for i, id in ipairs(ids) do
      if waiting[i] then
        local size = tonumber(string.match(waiting[i], '^%d+'))
        words[#words + 1] = id
        local adapted = split_adapter(prefixes[i] or '') ~= ''
        words[#words + 1] = patience_end(size, tonumber(submitted[i]), tonumber(dues[i] or nil), adapted) .. ' ' .. now
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

  local function wake_preferred()  -- the engines to which requests were left: an idle one would not ask by itself
    local tried = {}
    for name in pairs(so_far.left_to) do
      if #tried == RING_TRIES then break end
      tried[#tried + 1] = name
      call('PUBLISH', P .. 'bell:' .. name, '')
    end
    if #tried > 0 then call('ZREM', P .. 'bells', unpack(tried)) end
  end

  -- Enter the requests that were passed over, and wake the engines to which they were left.  Returns the ms after which
  -- the engine should ask again, 0 if it has left none, and its backlog with what it has claimed.
  local function finish()
    for lane, found in pairs(so_far.passed_over) do
      local ids = {}
      for id in pairs(found) do
        ids[#ids + 1] = id
        if #ids == COMMAND_WORDS then
          note_passed_over(lane, ids)
          ids = {}
        end
      end
      if #ids > 0 then note_passed_over(lane, ids) end
    end
    wake_preferred()
    return so_far.retry_at and math.max(1, math.ceil(so_far.retry_at - now)) or 0, so_far.backlog
  end

  return choose, note_claim, finish
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
