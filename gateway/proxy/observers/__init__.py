"""Observers of requests, which change nothing about them: latency metrics, traces, shadow policies."""
