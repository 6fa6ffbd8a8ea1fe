-- Look at the leases of some replicas: renew those held, claim those that are free and wanted, report the others.
-- KEYS  for each replica: lease, head, request, newest, deltas, snapshot
-- ARGV  gateway token, lease (ms), the time that unused keys stay (s), then for each replica:
--       'look' or 'claim' (take it if it is free); its incarnation; the prefix of its keys
-- Returns the server's time, and for each replica: ours, held, free, newer (a newer incarnation is named) or refused (the
-- server accepts no writes); the number of its last delta; 1 if deltas and snapshot are there; the request (see keys.py),
-- empty if none; the newest incarnation named, or the refusal.
--
-- The name of the newest incarnation is renewed as long as a gateway leads that incarnation. Three leases after that an
-- older one may be led: then the name was a mistake, or the engine's clock was set back when it restarted. The name itself
-- is kept as long as the incarnation's data, so that the next incarnation's leader finds and drops these.
local token, lease, keep = ARGV[1], ARGV[2], ARGV[3]
local DAY = 86400
local time = call('TIME')
local out = {time[1] .. '.' .. string.format('%06d', time[2])}

local function newer(one, other)
  return (tonumber(one) or 0) > (tonumber(other) or 0)
end

-- Return the newest incarnation named: its process's start time in seconds, not in the future, or a name without order.
local function incarnation_at(key)
  local text = text_at(key)
  -- as NAME in keys.py
  if text and #text <= 64 and string.find(text, '^[%w.-]+$') and (tonumber(text) or 0) < time[1] + DAY then return text end
  if text then drop(key) end
  return false
end

local function claim(k, mine, base, before)
  local set = redis.pcall('SET', KEYS[k], token, 'NX', 'PX', lease)
  if type(set) == 'table' and set.err then
    return 'refused', refusal('SET', KEYS[k], set.err)
  end
  if before ~= mine then
    if before then
      for _, name in ipairs({'lease', 'head', 'deltas', 'snapshot', 'request'}) do
        drop(base .. ':' .. before .. ':' .. name)
      end
    end
  end
  call('SET', KEYS[k + 3], mine, 'EX', keep)
  return 'ours'
end

-- Return the lease's holder. A lease that does not end soon is not a gateway's, and is removed as it would last for ever.
local function holder_of(key)
  local holder = text_at(key)
  if holder and holder ~= token then
    local left = call('PTTL', key)
    if left < 0 or left > 2 * lease then
      drop(key)
      return false
    end
  end
  return holder
end

local function look(k, wanted, mine, base)
  local before = incarnation_at(KEYS[k + 3])
  if before and before ~= mine and newer(before, mine) then
    local left = call('PTTL', KEYS[k + 3])
    if left < 0 or left > keep * 1000 then
      call('EXPIRE', KEYS[k + 3], keep)
      return 'newer'
    end
    if left > keep * 1000 - 3 * lease or mine == '-' then return 'newer' end -- '-' takes any name, see UNNAMED in keys.py
  end
  local holder = holder_of(KEYS[k])
  if holder == token then
    call('PEXPIRE', KEYS[k], lease)
    call('SET', KEYS[k + 3], mine, 'EX', keep)
    return 'ours'
  elseif holder then
    return 'held'
  elseif wanted == 'look' then
    return 'free'
  end
  return claim(k, mine, base, before)
end

local function is(key, kind)
  local found = call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then drop(key) end
  return found == kind
end

for i = 0, #KEYS / 6 - 1 do
  local k, a = i * 6 + 1, i * 3 + 4
  local state, why = look(k, ARGV[a], ARGV[a + 1], ARGV[a + 2])
  local requested = ''
  if state == 'ours' then
    local request = text_at(KEYS[k + 2])
    if request then
      drop(KEYS[k + 2])
      requested = string.sub(request, 1, 1)
    end
    for _, j in ipairs({1, 4, 5}) do
      call('EXPIRE', KEYS[k + j], keep)
    end
  end
  local deltas, snapshot = is(KEYS[k + 4], 'stream'), is(KEYS[k + 5], 'list')
  out[#out + 1] = {state, string.format('%.0f', count_at(KEYS[k + 1])), deltas and snapshot and 1 or 0, requested, why or incarnation_at(KEYS[k + 3]) or ''}
end
return out
