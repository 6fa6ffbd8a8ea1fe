-- Give a lease back.
-- KEYS  leases
-- ARGV  gateway token
for _, lease in ipairs(KEYS) do
  if ask('GET', lease) == ARGV[1] then
    redis.call('DEL', lease)
  end
end
return 0
