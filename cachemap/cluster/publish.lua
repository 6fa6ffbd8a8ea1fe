-- Append one delta for each of some replicas, if this gateway holds the lease and the delta continues what is there.
-- KEYS  for each replica: lease, head, deltas
-- ARGV  gateway token, then for each replica: the delta's number, the delta
-- Returns for each: ok; lost (the lease is not this gateway's); behind (the last delta is not the one it wrote); or a refusal.
local time = call('TIME')
local now = struct.pack('<d', time[1] + time[2] / 1000000)
local out = {}
for i = 0, #KEYS / 3 - 1 do
  local lease, head, deltas = KEYS[i * 3 + 1], KEYS[i * 3 + 2], KEYS[i * 3 + 3]
  local n, delta = tonumber(ARGV[i * 2 + 2]), ARGV[i * 2 + 3]
  if text_at(lease) ~= ARGV[1] then
    out[#out + 1] = 'lost'
  elseif count_at(head) ~= n - 1 then
    out[#out + 1] = 'behind'
  else
    local added = redis.pcall('XADD', deltas, string.format('%.0f-0', n), 'd', now .. delta)
    if type(added) == 'table' and added.err then
      out[#out + 1] = refusal('XADD', deltas, added.err)
    else
      call('SET', head, string.format('%.0f', n), 'KEEPTTL')
      out[#out + 1] = 'ok'
    end
  end
end
return out
