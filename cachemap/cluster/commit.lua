-- Put a new snapshot in place of the old one, and remove deltas that it contains.
-- KEYS  lease, head, deltas, snapshot, the new snapshot
-- ARGV  gateway token, number of the last delta the snapshot contains,
--       'on': the deltas continue; those before the number in ARGV[4] are removed
--       or 'anew': all deltas are removed; the delta in ARGV[4], numbered as the snapshot, sends readers to it
--       the time that unused keys stay (s)
local lease, head, deltas, snapshot, new = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local n = tonumber(ARGV[2])
if text_at(lease) ~= ARGV[1] then
  drop(new)
  return 'lost'
end
local last = count_at(head)
if (ARGV[3] == 'on' and last < n) or (ARGV[3] == 'anew' and last >= n) then
  drop(new)
  return 'behind'
end
drop(snapshot) -- RENAME would free its memory while all clients wait
call('RENAME', new, snapshot)
call('EXPIRE', snapshot, ARGV[5])
if ARGV[3] == 'on' then
  ask('XTRIM', deltas, 'MINID', ARGV[4] .. '-0')
else
  local time = call('TIME')
  local now = struct.pack('<d', time[1] + time[2] / 1000000)
  drop(deltas)
  call('XADD', deltas, string.format('%.0f-0', n), 'd', now .. ARGV[4])
  call('SET', head, string.format('%.0f', n))
end
return 'ok'
