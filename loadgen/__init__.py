"""The load-test CLI: workloads, open-loop arrivals, reports, virtual-time simulation."""
