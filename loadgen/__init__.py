"""The load-test CLI: workloads, open- and closed-loop load, reports, and simulation in virtual time.

`workload` defines what is sent and when; `drive` sends it and records the times; `report` turns the records into
figures, tables and files; `simulate` plays the same load on a virtual clock; `plan` searches by simulation for the
number of replicas that an SLO needs. Each package imports only packages named before it. `run`, `compare`, `sweep` and
`demo` are the commands that send requests to servers; `cli` assembles all commands. Servers need only the OpenAI API
over HTTP: Hitherto's own response headers add columns where they are present.
"""
