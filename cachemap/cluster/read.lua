-- Return a part of a list or stream, of limited size. Foreign members may be of any size: none longer than gateways write
-- is returned.
-- KEYS  the list or stream
-- ARGV  'list' or 'stream'; where to begin: a member's index from 0, or an entry's id; the longest valid member (bytes);
--       bytes and members after which to stop
-- Returns whether there is more after these, and the members; or the length of one that is too long.
local key, kind, at, longest, most_bytes, most = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local out, bytes = {}, 0

local function size(member)
  if kind == 'list' then return #member end
  local sum = 0
  for _, text in ipairs(member[2]) do sum = sum + #text end
  return sum
end

local function next_member()
  if kind == 'list' then
    at = at + 1
    return ask('LINDEX', key, at - 1)
  end
  local found = ask('XRANGE', key, at, '+', 'COUNT', 1)[1]
  if found then at = '(' .. found[1] end
  return found
end

while bytes < most_bytes and #out < most do
  local member = next_member()
  if not member then return {0, out} end
  if size(member) > longest then return size(member) end
  bytes = bytes + size(member)
  out[#out + 1] = member
end
return {1, out}
