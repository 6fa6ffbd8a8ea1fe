-- The load that all gateways of a deployment have on each replica, and decisions made by it in one step.
--
-- KEYS  one prefix, whose braces keep all keys of a deployment in one slot; under it
--         load        hash: replica -> its packed load, the sum over all gateways
--         alive       sorted set: gateway token -> end of its lease (ms, by this server's clock alone)
--         of:TOKEN    hash like `load`: one gateway's part of it
--         sent:N      hash for 5 s of time: hash of a prompt's prefix -> replicas that the prompt was sent to
-- ARGV  an operation, the gateway's token, and the operation's arguments. Lists are packed into one argument each, and
--       names are joined by line feeds.
--
-- This text is preceded by `cost`, the policy's cost formula in Lua, and by FAR, which stands for an unknown time.
-- A gateway that stops renewing its lease is removed from `load` with the next heartbeat of any other. Each gateway
-- restates its part with every heartbeat, and sums are compared with their parts, so data that is lost or damaged here
-- is repaired within seconds. An invalid load counts as none.
local LOAD, ALIVE, OF, SENT = KEYS[1] .. 'load', KEYS[1] .. 'alive', KEYS[1] .. 'of:', KEYS[1] .. 'sent:'
local PACKED = '<dddddd' -- requests, prefilling, prefill tokens, decoding, context tokens, expected output tokens
local SIZE = 48 -- bytes of a packed load
local STANDING = 56 -- bytes of a gateway's view of a replica: two speeds, then five numbers for `load_of`
local NOTHING = struct.pack(PACKED, 0, 0, 0, 0, 0, 0)
local MOST = 1e12 -- upper bound of every count
local GENERATION = 5000 -- ms; `sent` entries live for one to two generations
local AUDITED = 5000 -- parts audited per second by all gateways, at four heartbeats a second each; 1 us per part
local SLICE = 1000 -- most replicas audited per heartbeat
local MOST_NAMES = 20000 -- most replicas or gateways; a key with more belongs to another program
local REAPED = 100 -- most gateways with expired leases that are removed at once

local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function numbers(packed)
  if type(packed) == 'string' and #packed == SIZE then
    local a, b, c, d, e, f = struct.unpack(PACKED, packed)
    -- false for NaN
    if a >= 0 and b >= 0 and c >= 0 and d >= 0 and e >= 0 and f >= 0
      and a < MOST and b < MOST and c < MOST and d < MOST and e < MOST and f < MOST then
      return a, b, c, d, e, f
    end
  end
  return 0, 0, 0, 0, 0, 0
end

local function put(key, replica, a, b, c, d, e, f)
  if a == 0 and b == 0 and c == 0 and d == 0 and e == 0 and f == 0 then
    call('HDEL', key, replica)
  else
    call('HSET', key, replica, struct.pack(PACKED, a, b, c, d, e, f))
  end
end

local function add(key, replica, packed, sign)
  local a, b, c, d, e, f = struct.unpack(PACKED, packed)
  local a0, b0, c0, d0, e0, f0 = numbers(ask('HGET', key, replica))
  -- below zero only if data was lost, which the next heartbeats repair
  put(key, replica, math.max(0, a0 + sign * a), math.max(0, b0 + sign * b), math.max(0, c0 + sign * c),
    math.max(0, d0 + sign * d), math.max(0, e0 + sign * e), math.max(0, f0 + sign * f))
end

local function reap(token)
  bound('HLEN', OF .. token, MOST_NAMES)
  local loads = ask('HGETALL', OF .. token)
  for i = 1, #loads, 2 do
    if #loads[i + 1] == SIZE then add(LOAD, loads[i], struct.pack(PACKED, numbers(loads[i + 1])), -1) end
  end
  drop(OF .. token)
  call('ZREM', ALIVE, token)
end

local function reap_dead()
  for _, token in ipairs(ask('ZRANGEBYSCORE', ALIVE, '-inf', string.format('(%.0f', now), 'LIMIT', 0, REAPED)) do reap(token) end
end

local function alive(token)
  local ends = tonumber(ask('ZSCORE', ALIVE, token))
  return ends and ends >= now
end

local function renew(token, lease)
  call('ZADD', ALIVE, string.format('%.0f', now + lease), token)
  call('PEXPIRE', OF .. token, 10 * lease) -- in case its entry in `alive` is lost, so that it is never reaped
end

local function count(token, replica, packed)
  add(LOAD, replica, packed, 1)
  add(OF .. token, replica, packed, 1)
end

local function names(joined)
  local found = {}
  for name in string.gmatch(joined, '[^\n]+') do found[#found + 1] = name end
  return found
end

local function count_all(token, joined, loads)
  for i, replica in ipairs(names(joined)) do count(token, replica, string.sub(loads, SIZE * (i - 1) + 1, SIZE * i)) end
end

local operations = {}

-- Join under a new token. Arguments: token, lease (ms), former token or '', replicas, all outstanding load on them.
function operations.join(token)
  reap_dead()
  if ARGV[4] ~= '' then reap(ARGV[4]) end
  renew(token, ARGV[3])
  count_all(token, ARGV[5], ARGV[6])
  return 1
end

function operations.leave(token)
  reap(token)
  return 1
end

-- Set the gateway's part to the stated loads; return how many differed.
local function restate(token, replicas, loads)
  local key, there, wrong = OF .. token, {}, 0
  local found = ask('HGETALL', key)
  for i = 1, #found, 2 do there[found[i]] = found[i + 1] end
  for i, replica in ipairs(replicas) do
    local packed = string.sub(loads, SIZE * (i - 1) + 1, SIZE * i)
    if packed ~= NOTHING then
      if there[replica] ~= packed then
        call('HSET', key, replica, packed)
        wrong = wrong + 1
      end
      there[replica] = nil
    end
  end
  for replica in pairs(there) do
    call('HDEL', key, replica)
    wrong = wrong + 1
  end
  return wrong
end

-- Return the tokens of all gateways; a lease with an impossibly late end is shortened.
local function gateways(lease)
  local found, tokens = call('ZRANGEBYSCORE', ALIVE, '-inf', '+inf', 'WITHSCORES'), {}
  for i = 1, #found, 2 do
    tokens[#tokens + 1] = found[i]
    if tonumber(found[i + 1]) > now + 2 * lease then call('ZADD', ALIVE, string.format('%.0f', now + lease), found[i]) end
  end
  return tokens
end

-- Return as many of these replicas and those with a load as there is time to audit, from another start each time.
local function to_audit(replicas, gateways)
  local all, known = {}, {}
  for _, replica in ipairs(replicas) do all[#all + 1], known[replica] = replica, true end
  for _, replica in ipairs(ask('HKEYS', LOAD)) do
    if not known[replica] then all[#all + 1] = replica end
  end
  local slice = {}
  for i = 1, math.min(#all, SLICE, math.max(1, math.floor(AUDITED / (4 * gateways * gateways)))) do
    slice[i] = all[(time[2] + i) % #all + 1]
  end
  return slice
end

-- Set sums to the totals of their parts; return how many differed.
local function audit(replicas, lease)
  local tokens = gateways(lease)
  local slice, sums, wrong = to_audit(replicas, #tokens), {}, 0
  if #slice == 0 then return 0 end
  for i = 1, #slice do sums[i] = {0, 0, 0, 0, 0, 0} end
  for _, token in ipairs(tokens) do
    for i, packed in ipairs(ask('HMGET', OF .. token, unpack(slice))) do
      if packed then
        for n, number in ipairs({numbers(packed)}) do sums[i][n] = sums[i][n] + number end
      end
    end
  end
  for i, packed in ipairs(ask('HMGET', LOAD, unpack(slice))) do
    local sum = struct.pack(PACKED, unpack(sums[i]))
    if (packed or NOTHING) ~= sum then
      put(LOAD, slice[i], unpack(sums[i]))
      wrong = wrong + 1
    end
  end
  return wrong
end

-- Renew the lease and repair loads. Arguments: token, lease (ms), replicas, this gateway's load on each. Returns all
-- gateways' load on each of the replicas, and how many of this gateway's loads and how many sums were repaired; 0 if the
-- token is not alive.
function operations.beat(token)
  reap_dead()
  if not alive(token) then return 0 end
  bound('ZCARD', ALIVE, MOST_NAMES)
  bound('HLEN', LOAD, MOST_NAMES)
  bound('HLEN', OF .. token, MOST_NAMES)
  renew(token, ARGV[3])
  local replicas, loads = names(ARGV[4]), {}
  local parts = restate(token, replicas, ARGV[5])
  local sums = audit(replicas, ARGV[3])
  if #replicas > 0 then loads = ask('HMGET', LOAD, unpack(replicas)) end
  for i = 1, #replicas do loads[i] = struct.pack(PACKED, numbers(loads[i])) end
  return {loads, parts, sums}
end

-- Return a hash's loads of the replicas, as tables of numbers.
local function loads_at(key, replicas)
  local found = ask('HMGET', key, unpack(replicas))
  for i = 1, #replicas do found[i] = {numbers(found[i])} end
  return found
end

local function store(key, replicas, loads, changed)
  local kept, gone = {}, {}
  for i in pairs(changed) do
    local packed = struct.pack(PACKED, unpack(loads[i]))
    if packed == NOTHING then
      gone[#gone + 1] = replicas[i]
    else
      kept[#kept + 1] = replicas[i]
      kept[#kept + 1] = packed
    end
  end
  if #kept > 0 then call('HSET', key, unpack(kept)) end
  if #gone > 0 then call('HDEL', key, unpack(gone)) end
end

-- Set the first replicas' parts to the stated loads, and mark those that differed in `changed`.
local function count_stated(packed, ours, all, changed)
  for i = 1, #packed / SIZE do
    local stated = {struct.unpack(PACKED, packed, SIZE * (i - 1) + 1)}
    for n = 1, 6 do
      local by = stated[n] - ours[i][n]
      if by ~= 0 then
        -- below zero only if data was lost, which the next heartbeats repair
        all[i][n], ours[i][n], changed[i] = math.max(0, all[i][n] + by), stated[n], true
      end
    end
  end
end

-- Return a replica's load for `cost`: the sums here, and the gateway's view of its engine (at byte `at` of `standing`).
-- The begin of its prefills is not known. Whether it is late the gateway judges by its own requests and clock.
local function load_of(counts, standing, at)
  local load = {since = FAR, begun = counts[2], begun_tokens = counts[3]}
  load.requests, load.prefilling, load.prefill_tokens, load.decoding, load.context_tokens, load.output_tokens = unpack(counts)
  load.waiting, load.kv_usage, load.capacity_tokens, load.recent, load.due = struct.unpack('<ddddd', standing, at)
  return load
end

-- Return where prompts with these prefixes were sent in this generation and in the one before, by prefix.
local function sent_lately(fields)
  local current, before = {}, {}
  if #fields > 0 then
    local generation = math.floor(now / GENERATION)
    local one, other = ask('HMGET', SENT .. generation, unpack(fields)), ask('HMGET', SENT .. (generation - 1), unpack(fields))
    for i, field in ipairs(fields) do current[field], before[field] = one[i] or '', other[i] or '' end
  end
  return current, before
end

-- Return for each replica the number of the longest of these prefixes (in order of length) that it was sent.
local function longest_sent(fields, current, before)
  local longest = {}
  for i = #fields, 1, -1 do
    local known = current[fields[i]] .. '\n' .. before[fields[i]]
    if known ~= '\n' then
      for replica in string.gmatch(known, '[^\n]+') do longest[replica] = longest[replica] or i end
    end
  end
  return longest
end

local function record_sent(fields, current, changed, replica)
  for _, field in ipairs(fields) do
    local known = current[field]
    if known == '' then
      current[field], changed[field] = replica, true
    elseif not string.find('\n' .. known .. '\n', '\n' .. replica .. '\n', 1, true) then
      current[field], changed[field] = known .. '\n' .. replica, true
    end
  end
end

local function store_sent(current, changed)
  local changes = {}
  for field in pairs(changed) do
    changes[#changes + 1] = field
    changes[#changes + 1] = current[field]
  end
  if #changes > 0 then
    local key = SENT .. math.floor(now / GENERATION)
    call('HSET', key, unpack(changes))
    call('PEXPIRE', key, 2 * GENERATION + 1000)
  end
end

-- Remove a replica from `sent`, since a prompt did not go there after all. Arguments: token, replica, hashes of prefixes.
-- Another prompt with the same beginning that did go there is forgotten too; its engine has reported the blocks by now.
function operations.unsent()
  local replica, hashes, fields = ARGV[3], ARGV[4], {}
  for i = 1, #hashes / 8 do fields[i] = string.sub(hashes, 8 * i - 7, 8 * i) end
  local generation = math.floor(now / GENERATION)
  for _, key in ipairs({SENT .. generation, SENT .. (generation - 1)}) do
    for i, known in ipairs(ask('HMGET', key, unpack(fields))) do
      local left = {}
      for _, name in ipairs(known and names(known) or {}) do
        if name ~= replica then left[#left + 1] = name end
      end
      if #left > 0 then
        call('HSET', key, fields[i], table.concat(left, '\n'))
      elseif known then
        call('HDEL', key, fields[i])
      end
    end
  end
  return 1
end

-- Return a request from its five arguments at ARGV[at], see `turn`; its prefixes are added to `fields`, each once.
local function request_at(at, fields, seen)
  local header, hashes = ARGV[at], ARGV[at + 4]
  local one = {held = ARGV[at + 2], counts = ARGV[at + 3], terms = {}, who = {}, fields = {}}
  local position
  one.draw, one.ratio, one.slack, one.size, one.most, position = struct.unpack('<ddddd', header)
  for i = 1, (#header - 40) / 8 do one.terms[i], position = struct.unpack('<d', header, position) end
  for i = 1, #ARGV[at + 1] / 2 do one.who[i] = struct.unpack('<H', ARGV[at + 1], 2 * i - 1) + 1 end
  for i = 1, #hashes / 8 do
    local field = string.sub(hashes, 8 * i - 7, 8 * i)
    one.fields[i] = field
    if not seen[field] then fields[#fields + 1], seen[field] = field, true end
  end
  return one
end

-- Return the n-th candidate's cached tokens: in its first tier, in slower ones, and the latter by their worth.
local function held_by(request, n)
  local many = #request.who
  local overlap, lower, fetched = struct.unpack('<d', request.held, 8 * n - 7), 0, 0
  if #request.held > 8 * many then
    lower, fetched = struct.unpack('<d', request.held, 8 * (many + n) - 7), struct.unpack('<d', request.held, 8 * (2 * many + n) - 7)
  end
  return overlap, lower, fetched
end

-- Choose a candidate for the request; return its index, its tokens in the first tier (-1: as the gateway said), and its
-- tokens in all tiers.
local function choose(request, replicas, loads, standing, longest)
  local costs, held, cached, least = {}, {}, {}, math.huge
  for n, i in ipairs(request.who) do
    local overlap, lower, fetched = held_by(request, n)
    local depth = longest[replicas[i]]
    held[n] = -1
    if depth then
      local sent = math.min(struct.unpack('<I4', request.counts, 4 * depth - 3), request.most) * request.size
      if sent > overlap then
        local left = math.max(0, overlap + lower - sent) -- in slower tiers, after the prefix that was sent there
        fetched = lower > 0 and fetched * left / lower or 0
        overlap, lower, held[n] = sent, left, sent
      end
    end
    local speed, pace = struct.unpack('<dd', standing, STANDING * (i - 1) + 1)
    local sum = cost(request.terms, overlap, lower, fetched, loads[i], speed, pace)
    costs[n], cached[n] = sum == sum and sum or math.huge, overlap + lower
    least = math.min(least, costs[n])
  end
  local ties = {}
  for n, sum in ipairs(costs) do
    if sum <= least * request.ratio + request.slack then ties[#ties + 1] = n end
  end
  local chosen = ties[math.floor(request.draw * #ties) + 1]
  return chosen, held[chosen], cached[chosen]
end

-- Take changed loads and decide requests. Arguments: token; replicas; this gateway's changed loads on the first of them;
-- for each replica two speeds and five numbers of the gateway's view of its load; then five for each request, in the
-- order of decision:
--   draw, ratio, slack, tokens per block, blocks that can be found cached, and the request's terms for `cost`, the first
--   of which is its prompt tokens and the third its expected output tokens
--   its candidates, as indices from 0 into the replicas
--   each candidate's cached tokens: in its first tier; then, if any holds more, in slower ones, and those by their worth
--   the lengths in blocks of prefixes of its prompt
--   the hashes of these prefixes
-- Returns eight numbers for each request: the index into its candidates from 0, cached tokens (-1: as the gateway said),
-- and the other gateways' load on the replica before. 0 if the token is not alive: then nothing is counted.
function operations.turn(token)
  if not alive(token) then return 0 end
  local replicas, standing = names(ARGV[3]), ARGV[5]
  if #replicas == 0 then return '' end
  local ours, all, changed = loads_at(OF .. token, replicas), loads_at(LOAD, replicas), {}
  count_stated(ARGV[4], ours, all, changed)

  local requests, fields, seen, loads, answers, anew = {}, {}, {}, {}, {}, {}
  for at = 6, #ARGV, 5 do requests[#requests + 1] = request_at(at, fields, seen) end
  local current, before = sent_lately(fields)
  if #requests > 0 then
    for i = 1, #replicas do loads[i] = load_of(all[i], standing, STANDING * (i - 1) + 17) end
  end
  for number, request in ipairs(requests) do
    local chosen, held, cached = choose(request, replicas, loads, standing, longest_sent(request.fields, current, before))
    local i = request.who[chosen]
    local others = {}
    for n = 1, 6 do others[n] = math.max(0, all[i][n] - ours[i][n]) end
    answers[number] = struct.pack('<dddddddd', chosen - 1, held, unpack(others))
    for _, counts in ipairs({all[i], ours[i]}) do
      counts[1], counts[2], counts[3] = counts[1] + 1, counts[2] + 1, counts[3] + request.terms[1] - cached
      counts[6] = counts[6] + request.terms[3]
    end
    loads[i], changed[i] = load_of(all[i], standing, STANDING * (i - 1) + 17), true
    record_sent(request.fields, current, anew, replicas[i])
  end

  store(LOAD, replicas, all, changed)
  store(OF .. token, replicas, ours, changed)
  store_sent(current, anew)
  return table.concat(answers)
end

return operations[ARGV[1]](ARGV[2])
