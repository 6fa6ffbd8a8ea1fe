"""What a load is: conversations, from texts, traces and generators, and when they begin."""
