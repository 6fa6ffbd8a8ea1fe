-- The start of every script. Data in Redis is not trusted: another program, an operator or an eviction may have changed it.

local LONGEST = 256 -- the most bytes that gateways write to a key with a single string

-- Return what Redis refused, at which key, and its own words. `describe` in connect.py parses this.
local function refusal(command, key, said)
  return 'refuses ' .. command .. (key and ' at ' .. key or '') .. ': ' .. string.gsub(said, '%s+$', '')
end

-- Run a command. If Redis refuses it, the script fails with the command and the key, which Redis's message lacks.
local function call(command, ...)
  local found = redis.pcall(command, ...)
  if type(found) == 'table' and found.err then error(refusal(command, (...), found.err), 0) end
  return found
end

-- Remove a key. Foreign data may be of any size, so its memory is freed in the background.
local function drop(key)
  call('UNLINK', key)
end

-- Run a command on a key. A key of another type than the command needs is foreign: it is removed first.
local function ask(command, key, ...)
  local found = redis.pcall(command, key, ...)
  if type(found) ~= 'table' or not found.err then return found end
  if string.find(found.err, 'WRONGTYPE', 1, true) then drop(key) end
  return call(command, key, ...)
end

-- Return the string at a key, false if there is none. A string longer than gateways write is removed unread.
local function text_at(key)
  local text = ask('GETRANGE', key, 0, LONGEST)
  if text == '' then return call('EXISTS', key) == 1 and '' end
  if #text <= LONGEST then return text end
  drop(key)
  return false
end

-- Drop a key with more members than gateways write, before anything reads them all.
local function bound(count, key, most)
  if ask(count, key) > most then drop(key) end
end

-- Return the count at a key, 0 if there is no valid one.
local function count_at(key)
  local text = text_at(key)
  if text and #text <= 15 and string.find(text, '^%d+$') then return tonumber(text) end
  if text then drop(key) end
  return 0
end

