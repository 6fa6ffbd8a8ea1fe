"""What is wrong with a command line, in words that say what would be right: for every command of the house.

argparse names the type that it could not make ("invalid int value"), lists choices without the one that was probably
meant, says of a flag that it does not know no more than that, and not even that where another argument is missing.
"""

import argparse
import difflib
import errno
import math
import os
import re
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

_MISPLACED = re.compile(" required|invalid choice")  # what a misspelt flag, or the value after it, may be the cause of
_VALUELESS = re.compile(r"flag (--[\w-]+): ignored explicit argument .*")
_FLAG = re.compile(r"argument (-[\w/-]+)")
_NUMBER = re.compile(r"invalid (int|float) value: (.+)")
_NOTHING = re.compile(r"flag (--[\w-]+): expected (?:one|at least one) argument")
_NEGATIVE = re.compile(r"-\.?\d")  # argparse takes -80 for a value, and -80GiB for a flag
_ELSEWHERE = {"--replicas": "--launch", "--launch": "--replicas"}  # what another command calls the same thing
_CHOICE = re.compile(r"invalid choice: (.+) \(choose from (.+)\)")


class PlainParser(argparse.ArgumentParser, ABC):
    """argparse whose complaints say what would be right; whoever inherits decides how one ends the program."""

    _given: Sequence[str] = ()
    # About a flag that another program takes: a sentence, or "" if it is none that is known.
    of_another_program: Callable[[str], str] = staticmethod(lambda word: "")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = _NEGATIVE

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # also called for the command within
        self._given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if _MISPLACED.search(message) and (word := first_unknown(self._given, self)):
            self.refuse(unknown(word, self))
        said = in_words(message, self._given, options_of(self))
        self.refuse(f"{said}{'' if said.endswith('?') else '.'} `{self.prog} --help` lists what there is")

    @abstractmethod
    def refuse(self, why: str) -> NoReturn:
        """End with this complaint, which is a sentence or two without the program's name."""


def in_words(message: str, given: Sequence[str] = (), options: Sequence[str] = ()) -> str:
    """argparse's message about the arguments `given` to a command with these `options`, with what it says of flags,
    numbers and choices said plainly."""
    message = _FLAG.sub(lambda found: f"flag {_as_given(found[1].split('/'), given)}", message)
    if found := _NUMBER.search(message):
        kind = "no whole number" if found[1] == "int" else "no number"
        return f"{message[: found.start()]}{found[2]} is {kind}"
    if found := _NOTHING.search(message):
        word = next((after for before, after in pairwise(given) if before == found[1]), "")
        dashed = (
            f"; write one that begins with a dash as {found[1]}={word}"
            if word.startswith("-") and word not in options
            else ""
        )
        return f"flag {found[1]}: it needs a value{dashed}"
    if found := _VALUELESS.search(message):
        return f"flag {found[1]}: it takes no value"
    if found := _CHOICE.search(message):
        choices = [choice.strip("'") for choice in found[2].split(", ")]
        if len(choices) == 1:
            return f"{message[: found.start()]}{found[1]} is unknown; there is only {choices[0]}"
        return f"{message[: found.start()]}{found[1]} is none of {', '.join(choices)}{meant(found[1].strip(chr(39)), choices)}"
    return message


def _as_given(names: Sequence[str], given: Sequence[str]) -> str:
    """The one of a flag's names that was used."""
    used = {word.partition("=")[0] for word in given}
    return next((name for name in names if name in used), names[0])


def meant(word: str, known: list[str]) -> str:
    """`. Did you mean 'X'?`, or nothing. The only name that has `word` as one of its words comes before one that is
    spelt like it: --request-rate, not --trace, for --rate."""
    bare = {one.lstrip("-"): one for one in known}  # the dashes of flags make all of them alike
    whole = word.lstrip("-")
    longer = [one for one in bare if whole in one.split("-")]
    near = longer if len(longer) == 1 else difflib.get_close_matches(whole, bare, 1, 0.6)
    return f". Did you mean {bare[near[0]]!r}?" if near else ""


def none_of(given: object, known: list[str]) -> str:
    """About a value that is none of those that there are."""
    if given is None or given == "":
        return f"it has no value; name one of {', '.join(known)}"
    return f"{given!r} is none of {', '.join(known)}{meant(str(given), known)}"


def unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """About an argument that this command, or the one within it, does not take."""
    word = word.partition("=")[0]
    options = options_of(parser)
    if isinstance(parser, PlainParser) and (said := parser.of_another_program(word)):
        return said
    if (elsewhere := _ELSEWHERE.get(word)) in options:
        near = f". Did you mean {elsewhere!r}?"
    else:
        near = meant(word, options) if word.startswith("-") else ""
    return f"unknown argument {word!r}" + (near or f". `{parser.prog} --help` lists what there is")


def first_unknown(argv: Sequence[str], parser: argparse.ArgumentParser) -> str | None:
    """The first of a command's flags that it does not take. argparse says of what is missing before it says of what is
    too much, and one misspelt flag is both."""
    options = [*parser._option_string_actions, *options_of(parser)]
    for word in argv:
        if word == "--":
            break
        name = word.partition("=")[0]
        if len(name) < 2 or name[0] != "-" or _NEGATIVE.match(name) or name in options:
            continue
        if name[1] != "-" and name[:2] in options:  # -n3
            continue
        if not (parser.allow_abbrev and any(option.startswith(name) for option in options)):
            return word
    return None


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """The long flags of a command and of the commands within it."""
    found = [option for option in parser._option_string_actions if option.startswith("--")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found += options_of(inner)
    return found


def before_command(word: str, prog: str) -> str:
    """About a flag where a command belongs."""
    return (
        f"unknown argument {word!r}: a command comes first, as in `{prog} COMMAND {word}`. `{prog} --help` lists them"
    )


HELP_AND_VERSION = ("-h", "--help", "-V", "--version")  # the flags that need no command


def port(text: str) -> int:
    """A port to listen on, 0 for a free one. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: it reads 0 (any free one) to 65535")
    return int(text)


def number(text: str, fits: Callable[[float], bool], otherwise: str) -> float:
    """Return the number that `text` is. Raises ArgumentTypeError, saying what it is `otherwise`."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text} is {otherwise}")
    return value


def positive(text: str) -> float:
    return number(text, lambda value: 0 < value < math.inf, "not above zero and finite")


def seconds(text: str) -> float:
    return number(text, lambda value: 0 <= value < math.inf, "not zero or above")


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def refuse_pipe(path: Path) -> None:
    """Raises OSError for a pipe where a file is needed that can be read more than once. A pipe is empty the second
    time, and a named one that nobody writes to would be waited for without a word."""
    if path.is_fifo():
        raise OSError(errno.ESPIPE, "it is a pipe, which cannot be read more than once")


def cannot_fetch(name: str, error: Exception, otherwise: str) -> str:
    """Why nothing of a model comes from its hub, by what huggingface_hub raised for it, and what to do. `otherwise`:
    what can be given instead."""
    missing = type(error).__name__ == "LocalEntryNotFoundError"  # of a library that takes seconds to import
    cause = error.__cause__ if missing else error
    if missing and getattr(cause, "response", None) is None:
        return (
            f"{name} is not in the cache of Hugging Face, and its hub can't be reached: connect this machine to it, "
            f"or {otherwise}"
        )
    return f"{name} can't be fetched ({_hubs_words(cause)}): set HF_TOKEN if the model is gated, or {otherwise}"


def _hubs_words(error: BaseException | None) -> str:
    """The hub's words in one line: the status and what was refused, which a blank line parts, without the number of the
    request and the advice for callers of the hub that follows."""
    head, _, rest = str(error).partition("\n\n")
    status = re.sub(r"\s*\(Request ID: [^)]*\)", "", head.partition("\n")[0])
    return f"{status} {rest.partition(chr(10))[0]}".strip()


def cannot_listen(host: str, port: int, error: OSError, port_flag: str = "--port", host_flag: str = "--host") -> str:
    """Why nobody can listen there, and what to do about it."""
    # asyncio writes the address into the words of the system, as Python does
    known = error.errno is not None and error.errno > 0
    said = f"cannot listen on {host}:{port}: {os.strerror(error.errno) if known else error.strerror or error}. "
    if isinstance(error, socket.gaierror) or error.errno == errno.ENODEV:
        return f"{said}{host} does not resolve: give an address of this machine with {host_flag}, or 0.0.0.0 for all"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{said}No interface of this machine has that address: give one of its own with {host_flag}, or 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return f"{said}This user may not take that port: give one above 1023 with {port_flag}"
    return f"{said}Stop what holds the port, or give another with {port_flag} (and {host_flag})"
