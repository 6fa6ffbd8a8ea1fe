"""The proxy process: bytes in, decision, bytes out."""

__version__ = "0.1.0"
