"""`loadgen calibrate URL`: measures an engine with bounded load and writes a timing profile for the simulated one.

`ask` asks the engine, `learn` for what it tells, `plan` says beforehand what will be asked, `measure` asks it and notes
times, `samples` says of what each time is made, `fit` finds the coefficients, `write` puts them into a file.
"""
