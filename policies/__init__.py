"""Pure functions from (request, candidates) to a choice: no I/O, no clock."""
