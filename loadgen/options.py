"""How the values of flags are read, for every verb; and the two ways in which a verb gives up."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

from replicas.arguments import number as number
from replicas.arguments import positive as positive
from replicas.arguments import seconds as seconds
from replicas.arguments import whole as whole
from replicas.spelling import did_you_mean

INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it
# What a 401 means, and where the key is read.
KEY_NEEDED = "it wants an API key, or another one; set OPENAI_API_KEY in the environment"
ATTAINMENT = 0.9  # share of the requests that must be within the limits, where no flag says


class BadInput(ValueError):
    """Something given can't be used; the message says what and why. Nothing was sent: exit code 2."""


class Failed(Exception):
    """A server, an engine or a process can't be used; the message says why and what to do: exit code 1."""


class BadOption(BadInput):
    """Flags that are wrong, or don't go together; the message names them."""


def flags(
    group: argparse._ActionsContainer,
    *rows: tuple[str, Callable | tuple[str, ...] | list[Callable] | None, str | None, object, str],
) -> None:
    """Add flags: of each its names, what reads the value, what stands for it in the help, its default, and the help.

    A tuple in place of a reader has all values there are, a list the reader of a flag that may be repeated, and None
    stands for a switch."""
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
    """A reader of whole numbers from 1 to the most that makes sense."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most:,}")
        return int(text)

    return read


def percentiles(text: str) -> list[float]:
    """Percentiles joined by commas, in ascending order."""
    found = sorted({number(part, lambda value: 0 <= value <= 100, "not from 0 to 100") for part in text.split(",")})
    return [int(one) if one.is_integer() else one for one in found]


def rates(text: str) -> tuple[float, ...]:
    """Rates joined by commas, lowest first."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def names(text: str, known: Collection[str], hint: str = "") -> list[str]:
    """Policies, joined by commas; `hint`: what is added where one is not known."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: name each policy once, joined by commas")
    for name in found:
        policy(name, known, hint)
    return found


def policy(name: str, known: Collection[str], hint: str = "") -> str:
    """One of those that are known, or a class of a file."""
    import policies  # here alone: most verbs need none

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
