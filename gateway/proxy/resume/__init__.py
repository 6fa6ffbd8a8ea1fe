"""The resumption of streams on another replica after theirs has failed (`--continue-streams`)."""
