-- Give a lease back.
-- KEYS  leases
-- ARGV  gateway token
for _, lease in ipairs(KEYS) do
  if text_at(lease) == ARGV[1] then
    call('DEL', lease)
  end
end
return 0
