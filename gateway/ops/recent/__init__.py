"""The gateway's record of its last 15 minutes, for the live page, in bounded memory and at no cost to requests."""
