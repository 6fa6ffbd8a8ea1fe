"""One file for each rule that chooses a replica."""
