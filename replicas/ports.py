"""Ports to listen on: parsing one from a command line, and the message if it is unavailable."""

import argparse
import errno
import os
import socket


def port(text: str) -> int:
    """Return a port to listen on, 0 for any free one. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: it reads 0 (any free one) to 65535")
    return int(text)


def cannot_listen(host: str, port: int, error: OSError, port_flag: str = "--port", host_flag: str = "--host") -> str:
    """Return why listening on `host`:`port` failed, and what to do about it."""
    # asyncio and Python put the address into the message, so the system's words are taken from the error number.
    reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or error
    said = f"cannot listen on {host}:{port}: {reason}. "
    if isinstance(error, socket.gaierror) or error.errno == errno.ENODEV:
        return f"{said}{host} does not resolve: give an address of this machine with {host_flag}, or 0.0.0.0 for all"
    return f"{said}Stop what holds the port, or give another with {port_flag} (and {host_flag})"
