"""A step-level model of vLLM's scheduler behind vLLM's own endpoints."""
