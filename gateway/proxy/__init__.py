"""One request's life: admit, choose, forward, retry, settle."""
