"""Sending a load: an HTTP client that records times, and counters read from servers."""
