-- Begins every script. What lies in Redis is not trusted: another program, an operator or an eviction may have been at it.

local LONGEST = 256 -- bytes of what gateways write at a key that holds a single string

-- What Redis refused, where, and its own words. `describe` in connect.py reads this.
local function refusal(command, key, said)
  return 'refuses ' .. command .. (key and ' at ' .. key or '') .. ': ' .. string.gsub(said, '%s+$', '')
end

-- Run a command. Where Redis refuses it the script ends with the command and the key, which its own words leave out.
local function call(command, ...)
  local found = redis.pcall(command, ...)
  if type(found) == 'table' and found.err then error(refusal(command, (...), found.err), 0) end
  return found
end

-- Remove what is none of ours. It may be of any size, and its memory is freed beside other commands.
local function drop(key)
  call('UNLINK', key)
end

-- Run a command on a key. A key of another type than the command needs is none of ours: it goes, and is as if it had never been.
local function ask(command, key, ...)
  local found = redis.pcall(command, key, ...)
  if type(found) ~= 'table' or not found.err then return found end
  if string.find(found.err, 'WRONGTYPE', 1, true) then drop(key) end
  return call(command, key, ...)
end

-- The string at a key, false if there is none. A longer one than gateways write is not read, and goes.
local function text_at(key)
  local text = ask('GETRANGE', key, 0, LONGEST)
  if text == '' then return call('EXISTS', key) == 1 and '' end
  if #text <= LONGEST then return text end
  drop(key)
  return false
end

-- Drop a key that has more members than gateways write, before anything reads them all.
local function bound(count, key, most)
  if ask(count, key) > most then drop(key) end
end

-- The count at a key, 0 where there is none or what is there cannot be one.
local function count_at(key)
  local text = text_at(key)
  if text and #text <= 15 and string.find(text, '^%d+$') then return tonumber(text) end
  if text then drop(key) end
  return 0
end

