"""The load-test CLI: workloads, open- and closed-loop load, reports, and simulation in virtual time.

`workload` defines what is sent and when. `drive` sends it over HTTP and records the times. `report` turns the records
into figures, tables and files. `simulate` plays the same load against simulated engines on a virtual clock. `plan`
searches by simulation for the number of replicas that an SLO needs. Each of these packages imports only packages named
before it.

The commands `run`, `compare`, `sweep`, `demo` and `calibrate` send requests to servers; `cli` assembles all commands.
Servers need only the OpenAI API over HTTP. Where a server is Hitherto's gateway, its response headers add the replica
and the predicted cached tokens to the report.
"""
