"""The path of one request: admission, choice of a replica, forwarding, retries, accounting."""
