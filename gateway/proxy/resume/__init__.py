"""Streams whose replica broke off, resumed on another one (`--continue-streams`)."""
