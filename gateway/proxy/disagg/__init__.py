"""Requests in two legs: one replica computes the prompt (prefill), another writes the answer (decode)."""
