"""`loadgen calibrate URL`: measure an engine with bounded load and write a timing profile for the simulated one.

`ask` sends requests and records times; `learn` reads what the engine reports of itself; `plan` decides beforehand what
is sent; `measure` sends it; `samples` splits each time into its components; `fit` finds the coefficients; `write`
formats the profile.
"""
