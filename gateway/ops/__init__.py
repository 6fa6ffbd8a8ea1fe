"""What operators use: health checks, metrics, traces, logs, the live page, the admin API, doctor and explain."""
