"""Sends a load: an HTTP client that notes times, one process or several, and what a server or engine says of itself."""
