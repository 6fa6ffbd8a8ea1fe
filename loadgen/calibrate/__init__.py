"""`loadgen calibrate URL`: measure an engine with bounded load and write a timing profile for the simulated one.

`ask` sends requests, records times and reads what the engine reports of itself; `fit` splits each time into its
components and finds the coefficients; `measure` decides beforehand what is sent, and sends it; `verb` has the flags and
writes the profile.
"""
