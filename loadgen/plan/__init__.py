"""Capacity planning: how many tokens a model's KV cache holds, and how many replicas a load needs to keep an SLO."""
