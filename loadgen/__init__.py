"""The load-test CLI: workloads, arrivals in open and closed loop, reports, virtual-time simulation.

`workloads` says what a load is; `traces` and `generators` make one, `datasets` by its name; `arrivals` says when, `client` asks
and notes the times, `drive` runs a whole load (`processes` several at once), `report` turns its records into figures and `show`
into words. Everything here speaks
plain OpenAI over HTTP: Hitherto's own response headers add columns when they are there, and
nothing depends on them.
"""
