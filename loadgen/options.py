"""Readers for flag values, shared by all commands, and the two errors that end a command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

from replicas.arguments import number as number
from replicas.arguments import positive as positive
from replicas.arguments import seconds as seconds
from replicas.arguments import whole as whole
from replicas.spelling import did_you_mean

INTERRUPTED = 130  # the exit code after Ctrl-C, as in shells: 128 + SIGINT
KEY_NEEDED = "it wants an API key, or another one; set OPENAI_API_KEY in the environment"
ATTAINMENT = 0.9  # default share of the requests that must be within the limits


class BadInput(ValueError):
    """An input that cannot be used; the message says what and why. Nothing was sent; exit code 2."""


class Failed(Exception):
    """A server, engine or process that cannot be used; the message says why and what to do. Exit code 1."""


class BadOption(BadInput):
    """A wrong flag, or flags that exclude each other; the message names them."""


def refuse(*rows: tuple[object, str]) -> None:
    """Raise BadOption if a row's condition is true.

    Each row is (condition, message); the message is that of the first true condition.
    """
    for wrong, why in rows:
        if wrong:
            raise BadOption(why)


def flags(
    group: argparse._ActionsContainer,
    *rows: tuple[str, Callable | tuple[str, ...] | list[Callable] | None, str | None, object, str],
) -> None:
    """Add flags to `group`, one per row: names, reader of the value, placeholder in the help, default, help text.

    The names are separated by blanks. The reader is a function of the flag's text, a tuple of the allowed values, a
    list with the reader of a repeatable flag, or None for a switch without a value.
    """
    for spelled, reads, placeholder, default, told in rows:
        read: dict[str, object] = {"metavar": placeholder}
        if reads is None:
            read = {"action": "store_true"}
        elif isinstance(reads, list):
            read |= {"type": reads[0], "action": "append"}
        else:
            read |= {"choices" if isinstance(reads, tuple) else "type": reads}
        group.add_argument(*spelled.split(), **read, default=default, help=told)


def rate(text: str) -> float:
    return number(text, lambda value: value > 0, "not above zero")


def share(text: str) -> float:
    return number(text, lambda value: 0 <= value < 1, "not from 0 to below 1")


def attainment(text: str) -> float:
    return number(text, lambda value: 0 < value <= 1, "not a share above 0 and up to 1: it reads 0.9 for 90 %")


def whole_to(most: int) -> Callable[[str], int]:
    """Return a function that reads a flag's text as a whole number from 1 to `most`."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most:,}")
        return int(text)

    return read


def percentiles(text: str) -> list[float]:
    """Read percentiles separated by commas; return them in ascending order."""
    found = sorted({number(part, lambda value: 0 <= value <= 100, "not from 0 to 100") for part in text.split(",")})
    return [int(one) if one.is_integer() else one for one in found]


def rates(text: str) -> tuple[float, ...]:
    """Read rates separated by commas; return them in ascending order."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def names(text: str, known: Collection[str], hint: str = "") -> list[str]:
    """Read policy names separated by commas. Raises ArgumentTypeError for unknown and repeated ones.

    `known`: all names there are; `hint`: appended to the error about an unknown name.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: name each policy once, joined by commas")
    for name in found:
        policy(name, known, hint)
    return found


def policy(name: str, known: Collection[str], hint: str = "") -> str:
    """Check that `name` is a known policy or a usable FILE:CLASS, and return it. Raises ArgumentTypeError.

    `known`: the names of all policies; `hint`: appended to the error about an unknown one.
    """
    import policies  # imported late: most commands need no policies

    if policies.is_own(name):
        try:
            policies.make_own(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    elif name not in known:
        raise argparse.ArgumentTypeError(
            f"there is no policy {name!r}{did_you_mean(name, known, '; there are ' + ', '.join(known) + hint)}"
        )
    return name
