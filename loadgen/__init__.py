"""The load-test CLI: workloads, arrivals in open and closed loop, reports, virtual-time simulation.

`workload` says what is asked and when; `drive` sends it and notes the times; `report` turns what came back into
figures, words and files; `simulate` plays the same load on a virtual clock; `plan` searches there for the replicas that
an SLO needs. Each knows only those before it. `run`, `compare`, `sweep` and `demo` are the verbs that ask servers;
`cli` has them all. Everything here speaks plain OpenAI over HTTP: Hitherto's own response headers add columns when they
are there, and nothing depends on them.
"""
