"""`loadgen calibrate URL`: measure an engine with a bounded load, and write a timing profile for simulated engines.

`ask` sends requests, records times and reads what the engine reports of itself. `fit` computes the profile's
coefficients from the times. `measure` plans what is sent, and sends it. `verb` has the flags and writes the profile.
"""
