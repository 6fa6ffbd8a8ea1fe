"""A simulated vLLM engine: a step-level scheduler model (`engine`), and the server that speaks for it (`server`).

Only the standard library is imported here: simulations take the engine without paying for the server.
"""
