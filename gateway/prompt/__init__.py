"""Request body to token ids to block hashes. Knows no replicas."""
