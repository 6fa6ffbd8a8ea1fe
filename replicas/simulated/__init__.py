"""A simulated vLLM engine: a model of vLLM's scheduler, step by step (`engine`), and an HTTP server (`server`).

Only the standard library is imported here: simulations use the engine without loading the server.
"""
