"""Number types for argparse arguments."""

import argparse
import math
from collections.abc import Callable


def number(text: str, fits: Callable[[float], bool], otherwise: str) -> float:
    """Return `text` as a number.

    Raises ArgumentTypeError; if the number does not satisfy `fits`, the message says that it is `otherwise`.
    """
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text} is {otherwise}")
    return value


def positive(text: str) -> float:
    """Return a finite number above zero."""
    return number(text, lambda value: 0 < value < math.inf, "not above zero and finite")


def seconds(text: str) -> float:
    """Return a finite number of seconds, zero included."""
    return number(text, lambda value: 0 <= value < math.inf, "not zero or above")


def whole(text: str) -> int:
    """Return a whole number above zero."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)
