"""A simulated vLLM engine: a model of vLLM's scheduler, step by step (`engine`), and an HTTP server (`server`).

This file imports nothing, so that simulations can use the engine without loading the server.
"""
