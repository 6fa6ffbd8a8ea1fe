"""How the values of flags are read, for every verb; and the two ways in which a verb gives up."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

from replicas.simulated import complaints
from replicas.simulated.complaints import number as number
from replicas.simulated.complaints import positive as positive
from replicas.simulated.complaints import seconds as seconds
from replicas.simulated.complaints import whole as whole

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
    group: argparse._ActionsContainer, *rows: tuple[str, Callable | tuple[str, ...], str | None, object, str]
) -> None:
    """Add flags that have a value: of each its names, what reads the value or which values there are, what stands for
    it in the help, its default, and the help."""
    for spelled, reads, placeholder, default, told in rows:
        read = {"choices": reads} if isinstance(reads, tuple) else {"type": reads}
        group.add_argument(*spelled.split(), **read, metavar=placeholder, default=default, help=told)


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


def names(text: str, known: Collection[str]) -> list[str]:
    """Policies, joined by commas."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: name each policy once, joined by commas")
    for name in found:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"there is no policy {name!r}{complaints.meant(name, list(known)) or '; there are ' + ', '.join(known)}"
            )
    return found
