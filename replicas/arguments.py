"""Number types for argparse arguments."""

import argparse
import math
from collections.abc import Callable


def number(text: str, fits: Callable[[float], bool], otherwise: str) -> float:
    """Return the number in an argument's text. Raises ArgumentTypeError if the text is no number, or an invalid one.

    `fits(value)`: returns whether the number is valid. `otherwise`: ends the message "X is ..." about an invalid one.
    """
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text} is {otherwise}")
    return value


def positive(text: str) -> float:
    """Return the finite number above zero in an argument's text. Raises ArgumentTypeError."""
    return number(text, lambda value: 0 < value < math.inf, "not above zero and finite")


def seconds(text: str) -> float:
    """Return the finite number of seconds, zero or more, in an argument's text. Raises ArgumentTypeError."""
    return number(text, lambda value: 0 <= value < math.inf, "not zero or above")


def whole(text: str) -> int:
    """Return the whole number above zero in an argument's text. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)
