-- Begins every script. What lies in Redis is not trusted: another program, an operator or an eviction may have been at it.

-- Run a command on a key. A key of another type than the command needs is none of ours: it goes, and is as if it had never been.
local function ask(command, key, ...)
  local found = redis.pcall(command, key, ...)
  if type(found) ~= 'table' or not found.err then return found end
  if string.find(found.err, 'WRONGTYPE', 1, true) then redis.call('DEL', key) end
  return redis.call(command, key, ...)
end

-- The count at a key, 0 where there is none or what is there cannot be one.
local function count_at(key)
  local text = ask('GET', key)
  if text and #text <= 15 and string.find(text, '^%d+$') then return tonumber(text) end
  if text then redis.call('DEL', key) end
  return 0
end

