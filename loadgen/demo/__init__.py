"""`loadgen demo`: two policies compared live, on engines that it starts."""
