-- Prefix locality: which request of a tenant's window an engine claims, and which request it leaves to another engine
-- for a moment.  "Locality" in KEYS.md.
--
-- Fairness and lanes choose the tenant.  Among the first WINDOW requests of the tenant's first priority class:
--
--   was a request passed over for too long? -- yes ---> claim it, in order
--   else the request with the longest cached prefix --> would another engine with free capacity begin it sooner?
--                                                         no:  claim it
--                                                         yes: leave it while that engine is ahead; try the next
--
-- After TRIES requests that it did not claim, a sync claims in queue order.

local function prefix_tokens(count)  -- tokens covered by the `count`-th prefix digest
  if count <= PREFIX_DENSE then return count * PREFIX_BLOCK end
  local beyond = count - PREFIX_DENSE - 1
  local step = PREFIX_DENSE / PREFIX_STEPS
  return (PREFIX_DENSE + step * (beyond % PREFIX_STEPS + 1)) * 2 ^ math.floor(beyond / PREFIX_STEPS) * PREFIX_BLOCK
end

local function prefix_digest(digests, at)
  return string.sub(digests, (at - 1) * DIGEST_BYTES + 1, at * DIGEST_BYTES)
end

local function each_part(command, key, digests)  -- run a command on a key with all digests, COMMAND_WORDS at a time
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

-- Record that an engine will hold the prefixes and the adapter of a request that it has claimed, before it computes
-- them.  `held`: number of the request's digests that it has published already.
local function add_prefixes(engine, prefixes, held)
  local adapter, digests = split_adapter(prefixes)
  each_part('SADD', P .. 'prefixes:' .. engine, adapter .. string.sub(digests, held * DIGEST_BYTES + 1))
end

-- Creates the functions by which an engine claims by prefix.  A sync calls `choose` for the tenant whose turn it is,
-- `note_claim` after each claim, and `finish` once at the end.
-- `me`: {name, token_us, step_us, backlog, load_us, loads, publishes, lacking} of the engine.  load_us: us until one
-- more adapter would be loaded, negative: it takes none.  loads: adapters that are loading or wait for it.  lacking:
-- whether any engine lacks an adapter.  `now`: unix ms.
--
-- They are nested here instead of shared, so that only claims by prefix spend time on creating them (scripts.py).
local function chooser(me, now)
  -- State of this sync's claims:
  --   windows      'LANE TENANT' -> result of read_window
  --   new_digests  digest -> true, prefixes and adapters of requests claimed since the last choice
  --   adapters     whether a request of a window needs an adapter
  --   passed_over  lane -> {id = true}, requests that the engine could have claimed and did not
  --   tried        number of requests examined without a claim
  --   retry_at     unix ms at which the engine should sync again; nil: it left no request to another engine
  --   left_to      engine -> true, engines to which this sync was the first to leave a request; `finish` wakes them
  --   backlog      prompt tokens that the engine has claimed and not computed, this sync's claims included
  --   loads        adapters that the engine still has to load, this sync's claims included
  --   others       result of engines_with_room; nil until it is needed
  local so_far = {windows = {}, new_digests = {}, adapters = false, passed_over = {on_time = {}, late = {}}, tried = 0,
                  left_to = {}, backlog = me.backlog, loads = me.loads}

  -- Returns for each request of a window how many of its digests the engine holds.  Checks the shortest prefixes first,
  -- because most engines hold none of them.  The other requests share one binary search: an engine that holds a prefix
  -- also holds the shorter prefixes.
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

  -- Returns {index = true} for the requests of a window that need an adapter which the engine does not hold.
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

  local function engines_with_room()  -- lists other live engines with free capacity and a recent sync that publish
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

  local function tokens_to_compute(size, held)  -- prompt tokens to compute for an engine with `held` of its digests
    return math.max(PREFIX_BLOCK, size - (held > 0 and prefix_tokens(held) or 0))
  end

  -- Returns the cost in us of a prompt of `size` tokens at an engine with `held` of its digests: the backlog, the
  -- prompt, and the first PACE_TOKENS decode steps.  A token to compute counts RECOMPUTE times, and more on a busy
  -- engine, since it delays later requests.  `lacks`: whether the engine has to load the adapter.
  local function start_cost(engine, backlog, size, held, lacks)
    local tokens = tokens_to_compute(size, held)
    local waited = RECOMPUTE * tokens + backlog * (1 + tokens / size)
    return waited * engine.token_us + PACE_TOKENS * engine.step_us + (lacks and math.max(0, engine.load_us) or 0)
  end

  -- Returns a window: at most WINDOW requests of a tenant's queue after the first `after`, in the priority class of the
  -- queue's first request.  Arrays in queue order: ids; prefixes: digests; shortest: first digest; entries: value in
  -- the hash `passed`, or false; held: number of digests that the engine holds; adapters: digest of the adapter, or '';
  -- lacks: whether the engine does not hold the adapter; left: whether the engine lacks its files; done: whether the
  -- request was tried or claimed.
  -- elsewhere: {held, lacks, left} of other engines, by name.  all_left: whether the engine lacks the files of all.
  -- nil if no request is left, or no request has a prefix or an adapter.
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

  -- Entries of `passed` are texts 'UNTIL MS' with as many digits as `now`, so comparing the texts compares UNTIL.
  -- Converting all entries of a window to numbers would take Redis as long as several commands.
  local last_overdue = now .. ' ~'

  -- Returns the index in a window of the request to try next, and whether it is urgent because it was passed over for
  -- too long.  Takes the first urgent request, else the request with the longest cached prefix; requests whose adapter
  -- the engine does not hold come last.  nil: all requests are done.
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

  -- Returns the unix ms from which a request that is first passed over now becomes urgent.  Its wait may double, or
  -- last until the backlog and its prompt could be computed if that is longer.  An on-time request waits at most
  -- PATIENCE_PERCENT of the time until `due`.  A request with an adapter waits at most LOADS_PASSED load times, so that
  -- a rarely used adapter does not starve.  `submitted`, `due`: unix ms; `due` is nil in the late lane, `submitted` is
  -- nil if Redis has evicted the request.
  local function patience_end(size, submitted, due, adapted)
    local patience = math.max(now - (submitted or now), (size + so_far.backlog) * me.token_us / 1000)
    if adapted and me.load_us > 0 then patience = math.min(patience, LOADS_PASSED * me.load_us / 1000) end
    if due then patience = math.min(patience, PATIENCE_PERCENT / 100 * (due - now)) end
    return math.min(math.ceil(now + patience), now + MEMORY_MS)
  end

  -- Returns the us by which another engine with free capacity would begin a request of a window sooner, and its name;
  -- 0: no engine would.  The result is at most the time that this engine takes for the uncached part of the prompt.
  local function time_ahead(window, at, size)
    local held, lacks = window.held[at], window.lacks[at]
    local mine, ahead, name = start_cost(me, so_far.backlog, size, held, lacks), 0, nil
    local most = tokens_to_compute(size, held) * me.token_us + (lacks and math.max(0, me.load_us) or 0)
    for _, other in ipairs(so_far.others) do
      if ahead >= most then break end
      if other.room >= size and (other.load_us >= 0 or window.adapters[at] == '') then
        -- Read once for all requests of the window: one read per request would dominate the time of a claim.
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

  -- Returns the unix ms until which the engine leaves a request of a window to another engine; nil: it does not.
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

  local function hold_new_digests()  -- count the prefixes and adapters of the latest claims as held, in all windows
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

  -- Returns the request of a window that the engine claims next, as `choose` does; nil: it leaves all remaining ones.
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
      -- On this engine the request would wait for other adapter loads; another engine may have the adapter, or load it
      -- sooner.
      local waits, left = window.lacks[at] and so_far.loads >= MAX_LOADS, window.left[at]
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
        return {id = id, size = size, prefixes = '', held = 0}  -- an urgent request that does not fit ends the claim
      end
    end
  end

  -- Returns the request that the engine claims next from a tenant's queue: {id, size, prefixes, held: number of its
  -- digests that the engine holds, waited: whether it was passed over before}; nil: it leaves the tenant's requests.
  -- `first`: {id, size, due} of the first request of the queue, which fits.  `most`: free capacity in prompt tokens.
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
        so_far.windows[key] = nil  -- read the window again: further requests may have moved into it
      else
        local further = window.all_left and read_window(lane, tenant, first.id, window.after + WINDOW)
        if not further then return nil end
        so_far.windows[key] = further
      end
    end
    if me.lacking and lacked_of(me.name, {adapter_of(first.id)})[1] then return nil end
    return {id = first.id, size = first.size, prefixes = '', held = 0}
  end

  local function note_claim(lane, request)  -- record the claim of the request that `choose` has returned
    so_far.backlog = so_far.backlog
                     + math.max(0, request.size - (request.held > 0 and prefix_tokens(request.held) or 0))
    so_far.passed_over[lane][request.id] = nil
    if request.lacks then so_far.new_digests[request.adapter], so_far.loads = true, so_far.loads + 1 end
    for at = request.held + 1, #request.prefixes / DIGEST_BYTES do
      so_far.new_digests[prefix_digest(request.prefixes, at)] = true
    end
  end

  local function note_passed_over(lane, ids)  -- add these requests to the hash `passed`
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
      -- Redis stores a small hash as a list, and would search it linearly for each request of a window.  A field name
      -- of more than 64 bytes makes Redis convert it to a hash table.
      local long = string.rep('-', 65)
      call('HSET', P .. 'passed', long, '', unpack(words))
      call('HDEL', P .. 'passed', long)
    end
  end

  local function wake_preferred()  -- wake the engines to which requests were left, since an idle engine would not sync
    local tried = {}
    for name in pairs(so_far.left_to) do
      if #tried == WAKE_TRIES then break end
      tried[#tried + 1] = name
      call('PUBLISH', P .. 'bell:' .. name, '')
    end
    if #tried > 0 then call('ZREM', P .. 'bells', unpack(tried)) end
  end

  -- Record the passed-over requests, and wake the engines to which requests were left.  Returns the ms after which the
  -- engine should sync again, 0 if it has left no request, and its backlog including this sync's claims.
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

local function sweep_prefixes()  -- remove stale entries of requests that processes of an earlier release have claimed
  local waiting = call('HLEN', P .. 'waiting')
  for _, key in ipairs({P .. 'prefixes', P .. 'passed'}) do
    if call('HLEN', key) > waiting then
      for _, id in ipairs(call('HKEYS', key)) do
        if call('HEXISTS', P .. 'waiting', id) == 0 then call('HDEL', key, id) end
      end
    end
  end
end
