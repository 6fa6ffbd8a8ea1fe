"""The built-in routing policies: a file for each rule that chooses a replica for a request."""
