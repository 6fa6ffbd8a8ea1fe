"""Checks that engines make the same token ids as the gateway, and have the KV blocks cached that it predicts."""
