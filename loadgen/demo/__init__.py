"""`loadgen demo`: two policies side by side, on engines of its own."""
