"""The load-test CLI: workloads, open-loop arrivals, reports, virtual-time simulation.

`workloads` says what is asked, `arrivals` when, `client` asks and notes the times, `drive` runs a
whole load, `report` turns its records into figures and `show` into words. Everything here speaks
plain OpenAI over HTTP: Hitherto's own response headers add columns when they are there, and
nothing depends on them.
"""
