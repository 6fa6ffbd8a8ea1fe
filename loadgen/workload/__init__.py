"""Loads: conversations from texts, traces and generators, and their start times."""
