"""The operator's side: health, metrics, status page, JSON API."""
