"""Serving engines: launched, adopted, watched, drained."""
