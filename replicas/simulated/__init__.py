"""A simulated vLLM engine: a step-level scheduler model (`engine`) and its HTTP server (`server`).

Only the standard library is imported here: simulations use the engine without loading the server.
"""
