"""The path of one request: admit, choose a replica, forward, retry, settle."""
