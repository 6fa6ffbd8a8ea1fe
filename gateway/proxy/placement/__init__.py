"""Which replica gets a request: who may, who is chosen, and the load ledger that gateways share."""
