"""`loadgen demo`: compare two routing policies live, on engines that the command starts."""
