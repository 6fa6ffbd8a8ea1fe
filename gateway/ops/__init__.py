"""The operator's side: health, metrics, traces, logs, the live page, JSON API, doctor and explain."""
