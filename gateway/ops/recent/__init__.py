"""The gateway's record of its last 15 minutes, for the live page: bounded memory, no cost to requests."""
