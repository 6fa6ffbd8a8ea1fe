"""Whether engines make the gateway's tokens, and hold the blocks that it predicts."""
