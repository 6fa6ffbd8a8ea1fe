"""Several processes on one port: `control` starts and watches them, `worker` is what each runs, `channel` is how they
talk, `ledger` is how they count together."""
