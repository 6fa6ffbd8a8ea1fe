"""Streams whose replica failed, resumed on another one (`--continue-streams`)."""
