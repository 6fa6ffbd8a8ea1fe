-- The load that all gateways of a deployment have put on each replica, and choices made by it in one step.
--
-- KEYS  one prefix, whose braces keep all of a deployment in one slot; under it
--         load        hash: replica -> its load, packed: the sum over all gateways
--         alive       sorted set: gateway token -> when its lease ends (ms, by this server's clock alone)
--         of:TOKEN    the part of `load` that one gateway answers for
--         sent:N      hash for 5 s of time: hash of a prompt's prefix -> replicas it was sent to
-- ARGV  an operation, the gateway's token, and what the operation needs. Lists are packed into one argument each:
--       packing 46 of them took the client 300 us, 7 take 50. Names are joined by line ends.
--
-- Before this text stands `cost`, what the gateways' policy weighs replicas by, in Lua, and FAR, a time that is not known.
-- A gateway that stops renewing its lease is taken out of `load` by whoever comes next. Each gateway restates its part with
-- every heartbeat, and sums are compared with their parts, so whatever is lost or damaged here is right again within
-- seconds. A load that cannot be one counts as none.
local LOAD, ALIVE, OF, SENT = KEYS[1] .. 'load', KEYS[1] .. 'alive', KEYS[1] .. 'of:', KEYS[1] .. 'sent:'
local PACKED = '<ddddd' -- requests, prefilling, prefill tokens, decoding, context tokens
local SIZE = 40 -- bytes of a packed load
local NOTHING = struct.pack(PACKED, 0, 0, 0, 0, 0)
local MOST = 1e12 -- of anything that is counted
local GENERATION = 5000 -- ms: predictions live for one to two of them
local AUDITED = 5000 -- parts compared in a second by all gateways together, at four heartbeats a second each: 1 us a part
local SLICE = 1000 -- replicas compared at once, at most
local MOST_NAMES = 20000 -- replicas, or gateways; a key with more is another program's
local REAPED = 100 -- gateways whose lease ended that are taken out at once

local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function numbers(packed)
  if type(packed) == 'string' and #packed == SIZE then
    local a, b, c, d, e = struct.unpack(PACKED, packed)
    -- NaN is neither
    if a >= 0 and b >= 0 and c >= 0 and d >= 0 and e >= 0 and a < MOST and b < MOST and c < MOST and d < MOST and e < MOST then
      return a, b, c, d, e
    end
  end
  return 0, 0, 0, 0, 0
end

local function put(key, replica, a, b, c, d, e)
  if a == 0 and b == 0 and c == 0 and d == 0 and e == 0 then
    call('HDEL', key, replica)
  else
    call('HSET', key, replica, struct.pack(PACKED, a, b, c, d, e))
  end
end

local function add(key, replica, packed, sign)
  local a, b, c, d, e = struct.unpack(PACKED, packed)
  local a0, b0, c0, d0, e0 = numbers(ask('HGET', key, replica))
  -- below zero only if something was lost, which the next heartbeats mend
  put(key, replica, math.max(0, a0 + sign * a), math.max(0, b0 + sign * b), math.max(0, c0 + sign * c),
    math.max(0, d0 + sign * d), math.max(0, e0 + sign * e))
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

for _, token in ipairs(ask('ZRANGEBYSCORE', ALIVE, '-inf', string.format('(%.0f', now), 'LIMIT', 0, REAPED)) do reap(token) end

local function alive(token) return call('ZSCORE', ALIVE, token) end

local function renew(token, lease)
  call('ZADD', ALIVE, string.format('%.0f', now + lease), token)
  call('PEXPIRE', OF .. token, 10 * lease) -- a part that nobody would reap, its entry in `alive` being lost
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

-- token, lease ms, former token or '', replicas and their loads: all this gateway has outstanding
function operations.join(token)
  if ARGV[4] ~= '' then reap(ARGV[4]) end
  renew(token, ARGV[3])
  count_all(token, ARGV[5], ARGV[6])
  return 1
end

function operations.leave(token)
  reap(token)
  return 1
end

-- token, replicas and changes of their loads; 0 if the token is not alive: then nothing is counted
function operations.move(token)
  if not alive(token) then return 0 end
  count_all(token, ARGV[3], ARGV[4])
  return 1
end

-- Make the gateway's part what the gateway says it is; gives how many loads were not.
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

-- Who is alive. A lease that ends later than any gateway can have asked for ends in time.
local function gateways(lease)
  local found, tokens = call('ZRANGEBYSCORE', ALIVE, '-inf', '+inf', 'WITHSCORES'), {}
  for i = 1, #found, 2 do
    tokens[#tokens + 1] = found[i]
    if tonumber(found[i + 1]) > now + 2 * lease then call('ZADD', ALIVE, string.format('%.0f', now + lease), found[i]) end
  end
  return tokens
end

-- Of these replicas and of those that have a load, as many as there is time for, beginning with another one each time
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

-- Make sums what their parts add up to; gives how many were not.
local function audit(replicas, lease)
  local tokens = gateways(lease)
  local slice, sums, wrong = to_audit(replicas, #tokens), {}, 0
  if #slice == 0 then return 0 end
  for i = 1, #slice do sums[i] = {0, 0, 0, 0, 0} end
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

-- token, lease ms, replicas, what this gateway has on each: renews the lease, mends what is wrong. Gives the load of all
-- on each of the replicas, and how many loads of this gateway and how many sums were wrong
function operations.beat(token)
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

-- Which of the replicas were sent the deepest known prefix: replica -> number of the depth
local function sent_to(fields)
  local deepest = {}
  if #fields == 0 then return deepest, {} end
  local generation = math.floor(now / GENERATION)
  local current = ask('HMGET', SENT .. generation, unpack(fields))
  local before = ask('HMGET', SENT .. (generation - 1), unpack(fields))
  for i = #fields, 1, -1 do
    for replica in string.gmatch((current[i] or '') .. '\n' .. (before[i] or ''), '[^\n]+') do
      if not deepest[replica] then deepest[replica] = i end
    end
  end
  return deepest, current
end

local function record_sent(fields, current, replica)
  local changes = {}
  for i, field in ipairs(fields) do
    local known = current[i] or ''
    if not string.find('\n' .. known .. '\n', '\n' .. replica .. '\n', 1, true) then
      changes[#changes + 1] = field
      changes[#changes + 1] = known == '' and replica or known .. '\n' .. replica
    end
  end
  if #changes > 0 then
    local key = SENT .. math.floor(now / GENERATION)
    call('HSET', key, unpack(changes))
    call('PEXPIRE', key, 2 * GENERATION + 1000)
  end
end

-- What the replica is known to do: the sums here, and what its engine and the asking gateway say. It is not known
-- since when it computes its prompts.
local function load_of(packed, waiting, kv_usage, capacity_tokens, recent)
  local load = {waiting = waiting, kv_usage = kv_usage, capacity_tokens = capacity_tokens, recent = recent, since = FAR}
  load.requests, load.prefilling, load.prefill_tokens, load.decoding, load.context_tokens = numbers(packed)
  load.begun, load.begun_tokens = load.prefilling, load.prefill_tokens
  return load
end

-- token, three numbers (draw, ratio, slack) and what `cost` takes of the request, candidates, depths, hashes at these
-- depths, replicas. A candidate is 9 numbers: what it holds (3), its speeds (2), and what the gateway knows of its load (4);
-- a depth is the tokens of a prefix.
-- Gives: index from 0, tokens held (-1: as the gateway thought), load met of all and of this gateway.
function operations.decide(token)
  if not alive(token) then return 0 end
  local header, candidates, depths, hashes, replicas = ARGV[3], ARGV[4], ARGV[5], ARGV[6], names(ARGV[7])
  local draw, ratio, slack, at = struct.unpack('<ddd', header)
  local request, fields = {}, {}
  for i = 1, (#header - 24) / 8 do request[i], at = struct.unpack('<d', header, at) end
  for i = 1, #hashes / 8 do fields[i] = string.sub(hashes, 8 * i - 7, 8 * i) end
  local loads = ask('HMGET', LOAD, unpack(replicas))
  local deepest, current = sent_to(fields)

  local costs, held, overlaps, least = {}, {}, {}, math.huge
  for i, replica in ipairs(replicas) do
    local overlap, lower, fetched, speed, pace, waiting, usage, capacity, recent = struct.unpack('<ddddddddd', candidates, 72 * (i - 1) + 1)
    held[i] = -1
    local depth = deepest[replica]
    if depth then
      local sent = struct.unpack('<d', depths, 8 * (depth - 1) + 1)
      if sent > overlap then
        local left = math.max(0, overlap + lower - sent) -- in slower tiers, behind what was sent there
        fetched = lower > 0 and fetched * left / lower or 0
        overlap, lower, held[i] = sent, left, sent
      end
    end
    local sum = cost(request, overlap, lower, fetched, load_of(loads[i], waiting, usage, capacity, recent), speed, pace)
    costs[i], overlaps[i] = sum == sum and sum or math.huge, overlap
    least = math.min(least, costs[i])
  end

  local ties = {}
  for i, sum in ipairs(costs) do
    if sum <= least * ratio + slack then ties[#ties + 1] = i end
  end
  local chosen = ties[math.floor(draw * #ties) + 1]
  local replica = replicas[chosen]
  local load, mine = struct.pack(PACKED, numbers(loads[chosen])), struct.pack(PACKED, numbers(ask('HGET', OF .. token, replica)))
  count(token, replica, struct.pack(PACKED, 1, 1, request[1] - overlaps[chosen], 0, 0))
  record_sent(fields, current, replica)
  return {chosen - 1, held[chosen], load, mine}
end

return operations[ARGV[1]](ARGV[2])
