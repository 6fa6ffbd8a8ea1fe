"""The reading of replicas' answers: errors, token usage, framing, stored responses."""
