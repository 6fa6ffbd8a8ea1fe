-- One look at the leases of some replicas: renew those held, claim those that are free and wanted, tell of the others.
-- KEYS  for each replica: lease, head, wish, life, deltas, snapshot
-- ARGV  gateway token, lease (ms), how long unused keys stay (s), then for each replica:
--       'hold' or 'claim' (take it if it is free) or 'look'; its incarnation; what its keys begin with
-- Gives the server's time, and for each replica: ours, held, free, newer (another incarnation is known) or refused
-- (the server takes no writes); the number of its last delta; 1 if what a reader begins with is there; 1 if somebody
-- wished for a resync; the newest incarnation known.
local token, lease, keep = ARGV[1], ARGV[2], ARGV[3]
local time = redis.call('TIME')
local out = {time[1] .. '.' .. string.format('%06d', time[2])}

local function newer(one, other)
  return (tonumber(one) or 0) > (tonumber(other) or 0)
end

local function claim(k, mine, base, before)
  if redis.pcall('SET', KEYS[k], token, 'NX', 'PX', lease).err then
    return 'refused'
  end
  if before ~= mine then
    if before then
      for _, name in ipairs({'lease', 'head', 'deltas', 'snapshot', 'wish'}) do
        redis.call('DEL', base .. ':' .. before .. ':' .. name)
      end
    end
    redis.call('SET', KEYS[k + 3], mine)
  end
  return 'ours'
end

local function look(k, wanted, mine, base)
  local before = redis.call('GET', KEYS[k + 3])
  if before and before ~= mine and newer(before, mine) then
    return 'newer'
  end
  local holder = redis.call('GET', KEYS[k])
  if holder == token then
    redis.call('PEXPIRE', KEYS[k], lease)
    return 'ours'
  elseif holder then
    return 'held'
  elseif wanted == 'look' then
    return 'free'
  end
  return claim(k, mine, base, before)
end

for i = 0, #KEYS / 6 - 1 do
  local k, a = i * 6 + 1, i * 3 + 4
  local state, wished = look(k, ARGV[a], ARGV[a + 1], ARGV[a + 2]), 0
  if state == 'ours' then
    wished = redis.call('DEL', KEYS[k + 2])
    for j = 1, 5 do
      redis.call('EXPIRE', KEYS[k + j], keep)
    end
  end
  local there = redis.call('EXISTS', KEYS[k + 4], KEYS[k + 5]) == 2 and 1 or 0
  out[#out + 1] = {state, redis.call('GET', KEYS[k + 1]) or '0', there, wished, redis.call('GET', KEYS[k + 3]) or ''}
end
return out
