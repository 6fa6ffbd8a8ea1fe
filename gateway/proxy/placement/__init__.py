"""The choice of a replica for each request: which may get it, which is chosen, and the load ledger of all gateways."""
