"""The processing of requests: admission, choice of a replica, forwarding, retries, accounting."""
