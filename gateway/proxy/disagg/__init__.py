"""Requests in two legs: one replica computes the prompt, another writes the answer."""
