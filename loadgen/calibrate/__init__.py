"""`loadgen calibrate URL`: measure an engine with bounded load and write a timing profile for the simulated one.

`ask` sends requests, records times and reads what the engine reports of itself; `fit` finds the profile's coefficients
from the times; `measure` decides beforehand what is sent, and sends it; `verb` has the flags and writes the profile.
"""
