"""What watches requests and changes nothing: figures, traces, shadow policies."""
