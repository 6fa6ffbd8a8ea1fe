"""Sending a load: an HTTP client that records times, one or several processes, and counters read from servers."""
