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
-- A gateway that stops renewing its lease is taken out of `load` by whoever comes next.
local LOAD, ALIVE, OF, SENT = KEYS[1] .. 'load', KEYS[1] .. 'alive', KEYS[1] .. 'of:', KEYS[1] .. 'sent:'
local PACKED = '<ddddd' -- requests, prefilling, prefill tokens, decoding, context tokens
local GENERATION = 5000 -- ms: predictions live for one to two of them

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function add(key, replica, packed, sign)
  local a, b, c, d, e = struct.unpack(PACKED, packed)
  a, b, c, d, e = a * sign, b * sign, c * sign, d * sign, e * sign
  local there = redis.call('HGET', key, replica)
  if there then
    local a0, b0, c0, d0, e0 = struct.unpack(PACKED, there)
    a, b, c, d, e = a + a0, b + b0, c + c0, d + d0, e + e0
  end
  if a == 0 and b == 0 and c == 0 and d == 0 and e == 0 then
    redis.call('HDEL', key, replica)
  else
    redis.call('HSET', key, replica, struct.pack(PACKED, a, b, c, d, e))
  end
end

local function reap(token)
  local loads = redis.call('HGETALL', OF .. token)
  for i = 1, #loads, 2 do add(LOAD, loads[i], loads[i + 1], -1) end
  redis.call('DEL', OF .. token)
  redis.call('ZREM', ALIVE, token)
end

for _, token in ipairs(redis.call('ZRANGEBYSCORE', ALIVE, '-inf', string.format('(%.0f', now))) do reap(token) end

local function alive(token) return redis.call('ZSCORE', ALIVE, token) end

local function renew(token, lease) redis.call('ZADD', ALIVE, string.format('%.0f', now + lease), token) end

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
  for i, replica in ipairs(names(joined)) do count(token, replica, string.sub(loads, 40 * i - 39, 40 * i)) end
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

-- token, lease ms, replicas: renews; gives for each replica the load of all and of this gateway
function operations.beat(token)
  if not alive(token) then return 0 end
  renew(token, ARGV[3])
  local replicas = names(ARGV[4])
  if #replicas == 0 then return {{}, {}} end
  return {redis.call('HMGET', LOAD, unpack(replicas)), redis.call('HMGET', OF .. token, unpack(replicas))}
end

-- Which of the replicas were sent the deepest known prefix: replica -> number of the depth
local function sent_to(fields)
  local deepest = {}
  if #fields == 0 then return deepest, {} end
  local generation = math.floor(now / GENERATION)
  local current = redis.call('HMGET', SENT .. generation, unpack(fields))
  local before = redis.call('HMGET', SENT .. (generation - 1), unpack(fields))
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
    redis.call('HSET', key, unpack(changes))
    redis.call('PEXPIRE', key, 2 * GENERATION + 1000)
  end
end

-- token, four numbers (random 0..1, ratio, slack, tokens), bids, depths, hashes at these depths, replicas. A bid is
-- 13 numbers, see `cost`; a depth two: tokens, and the own prefill of a replica of pace 1 that holds so many.
-- Gives: index from 0, tokens held (-1: as the bidder thought), load met of all and of this gateway.
function operations.decide(token)
  if not alive(token) then return 0 end
  local random, ratio, slack, tokens = struct.unpack('<dddd', ARGV[3])
  local bids, depths, hashes, replicas = ARGV[4], ARGV[5], ARGV[6], names(ARGV[7])
  local fields = {}
  for i = 1, #hashes / 8 do fields[i] = string.sub(hashes, 8 * i - 7, 8 * i) end
  local loads = redis.call('HMGET', LOAD, unpack(replicas))
  local deepest, current = sent_to(fields)

  local costs, held, uncached_of, least = {}, {}, {}, math.huge
  for i, replica in ipairs(replicas) do
    local own, pace, fixed, floor, per_request, if_prefilling, per_prefill_token, if_decoding, per_stream,
      per_context_token, own_per_stream, own_per_waiting, uncached = struct.unpack('<ddddddddddddd', bids, 104 * (i - 1) + 1)
    held[i] = -1
    local depth = deepest[replica]
    if depth then
      local at, own_there = struct.unpack('<dd', depths, 16 * (depth - 1) + 1)
      if tokens - at < uncached then own, uncached, held[i] = pace * own_there, tokens - at, at end
    end
    local cost = own + fixed
    if loads[i] then
      local requests, prefilling, prefill, decoding, context = struct.unpack(PACKED, loads[i])
      cost = cost + own * (own_per_stream * decoding + own_per_waiting * prefilling) + per_request * requests
        + per_prefill_token * prefill + per_stream * decoding + per_context_token * context
      if prefilling > 0 then cost = cost + if_prefilling end
      if decoding > 0 then cost = cost + if_decoding end
    end
    costs[i], uncached_of[i] = math.max(floor, cost), uncached
    least = math.min(least, costs[i])
  end

  local ties = {}
  for i, cost in ipairs(costs) do
    if cost <= least * ratio + slack then ties[#ties + 1] = i end
  end
  local chosen = ties[math.floor(random * #ties) + 1]
  local replica = replicas[chosen]
  local mine = redis.call('HGET', OF .. token, replica)
  count(token, replica, struct.pack(PACKED, 1, 1, uncached_of[chosen], 0, 0))
  record_sent(fields, current, replica)
  return {chosen - 1, held[chosen], loads[chosen] or '', mine or ''}
end

return operations[ARGV[1]](ARGV[2])
