-- What tenants have had of their limits, in all gateways of a deployment.
--
-- KEYS  one prefix, whose braces keep all of it in one slot; under it
--         gateways        sorted set: gateway token -> when its lease ends (ms, by this server's clock)
--         epoch           which life of this data it is: another one, once it was lost
--         of:TENANT       hash: kind -> count, kind@ -> the number of its window
--         running:TENANT  hash: gateway token -> COUNT:LEASE'S END
-- ARGV  an operation, the gateway's token, the length of a lease in ms, and what the operation needs
--
-- A claim is refused where the count and its cost, but at least 1, come to more than the limit (`limits.refused`). A gateway
-- that is not heard of for a lease runs nothing any more.
local op, token, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local MOST = 1e15 -- of anything that is counted
local KEEP = 40 * 24 * 3600 * 1000 -- ms; a month and more
local MOST_NAMES = 10000
local MOST_LEASES = 10 -- that one may end ahead of now: no gateway says that it lives on for longer

local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function number(text)
  local found = text and #text <= 16 and tonumber(text)
  if found and found >= 0 and found < MOST then return found end
  return nil
end

-- The window of a kind that this server's clock is in, so many minutes from now.
local function window_in(minutes, kind)
  local minute = math.floor(now / 60000) + minutes
  local day = math.floor(minute / 1440)
  if kind == 'day' then return day end
  if kind ~= 'month' then return minute end
  -- the Gregorian calendar repeats after 400 years of 146,097 days; counted from 1 March of the year 0, leap days come last
  local era = math.floor((day + 719468) / 146097)
  local rest = (day + 719468) % 146097
  local year = math.floor((rest - math.floor(rest / 1460) + math.floor(rest / 36524) - math.floor(rest / 146096)) / 365)
  rest = rest - 365 * year - math.floor(year / 4) + math.floor(year / 100)
  return 12 * (400 * era + year) + math.floor((5 * rest + 2) / 153) + 2
end

-- The count of a kind and its window: the one asked for, or a later one that is stored. A clock may be a minute ahead of this
-- server's; where the window asked for is later than that, its clock is wrong, and this server's window is taken.
local function counted(key, kind, window)
  local found, last = ask('HMGET', key, kind, kind .. '@'), window_in(1, kind)
  local count, at = number(found[1]), number(found[2])
  if window > last then window = window_in(0, kind) end
  if not count or not at or at < window or at > last then return 0, window end
  return count, at
end

local function put(key, kind, window, count)
  ask('HSET', key, kind, string.format('%.0f', math.max(0, count)), kind .. '@', string.format('%.0f', window))
end

local function state(name, running)
  local key = KEYS[1] .. 'running:' .. name
  if running <= 0 then
    ask('HDEL', key, token)
  else
    ask('HSET', key, token, string.format('%.0f:%.0f', running, now + lease))
    call('PEXPIRE', key, lease * 2)
  end
end

-- How many requests of a tenant run in this gateway, and in the others.
local function running(name)
  local key, own, others = KEYS[1] .. 'running:' .. name, 0, 0
  bound('HLEN', key, MOST_NAMES)
  local found = ask('HGETALL', key)
  for i = 1, #found, 2 do
    local count, ends = string.match(found[i + 1], '^(%d+):(%d+)$')
    count, ends = number(count), number(ends)
    if not count or not ends or ends < now or ends > now + MOST_LEASES * lease then
      call('HDEL', key, found[i])
    elseif found[i] == token then
      own = count
    else
      others = others + count
    end
  end
  return own, others
end

if op == 'beat' then
  local key, epoch = KEYS[1] .. 'gateways', text_at(KEYS[1] .. 'epoch')
  if not epoch or epoch == '' then
    epoch = ARGV[4]
    call('SET', KEYS[1] .. 'epoch', epoch)
  end
  bound('ZCARD', key, MOST_NAMES)
  ask('ZADD', key, now + lease, token)
  call('ZREMRANGEBYSCORE', key, '-inf', now)
  call('ZREMRANGEBYSCORE', key, '(' .. string.format('%.0f', now + MOST_LEASES * lease), '+inf')
  call('PEXPIRE', key, KEEP)
  return {call('ZCARD', key), epoch}
end

local name = ARGV[4]
local key = KEYS[1] .. 'of:' .. name

if op == 'state' then
  state(name, tonumber(ARGV[5]))
  return 1
end

if op == 'charge' then
  for i = 5, #ARGV, 3 do
    local kind, window, by = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
    local count, at = counted(key, kind, window)
    if at <= window or window >= window_in(0, kind) then put(key, kind, at, count + by) end -- else it is of a past window
  end
  call('PEXPIRE', key, KEEP)
  return 1
end

-- claim: ARGV[5] the limit of what runs, -1 without one; ARGV[6] what runs in this gateway, -1: as this server has it
local most, stated, reply = tonumber(ARGV[5]), tonumber(ARGV[6]), {0, 0}
local own, others = 0, 0
if most >= 0 then
  if stated >= 0 then state(name, stated) end
  own, others = running(name)
  if own + others + 1 > most then reply[1] = 1 end
end
reply[2] = others
local counts = {}
for i = 7, #ARGV, 4 do
  local kind, window, limit, cost = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local count, at = counted(key, kind, window)
  if reply[1] == 0 and count + math.max(cost, 1) > limit then reply[1] = 2 + (i - 7) / 4 end
  counts[#counts + 1] = {kind, at, count, cost}
end
if reply[1] == 0 then
  if most >= 0 then state(name, own + 1) end
  for _, one in ipairs(counts) do
    one[3] = one[3] + one[4]
    if one[4] > 0 then put(key, one[1], one[2], one[3]) end
  end
  call('PEXPIRE', key, KEEP)
end
for _, one in ipairs(counts) do
  reply[#reply + 1] = one[3]
end
return reply
