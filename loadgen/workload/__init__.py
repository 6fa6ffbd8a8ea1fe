"""Loads: conversations made from texts, traces, files or generators, and the times at which they begin."""
