"""The bytes of replicas' answers: errors, usage, framing, stored responses."""
