"""Messages about a wrong command line, for every command of the project: each says what would be right.

They replace some messages of argparse, which lists all choices without guessing the one that was meant, and does not
mention an unknown flag if another argument is missing.
"""

import argparse
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

from replicas.spelling import did_you_mean, none_of

_MISPLACED = re.compile(" required|invalid choice")  # errors that a misspelt flag may cause
_NEGATIVE = re.compile(r"-\.?\d")  # argparse takes -80 for a value, and -80GiB for a flag
_ELSEWHERE = {"--replicas": "--launch", "--launch": "--replicas"}  # another command's name for the same thing
_CHOICE = re.compile(r"invalid choice: (.+) \(choose from (.+)\)")


class PlainParser(argparse.ArgumentParser, ABC):
    """An argparse parser whose error messages say what to write instead.

    A subclass decides how a message ends the program (`refuse`).
    """

    _given: Sequence[str] = ()
    elsewhere = ""  # clause that ends a message: where else to look for an unknown flag

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = _NEGATIVE

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # argparse calls it for subcommands too
        self._given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if _MISPLACED.search(message) and (word := first_unknown(self._given, self)):
            self.refuse(unknown(word, self))
        said = in_words(message)
        self.refuse(f"{said}{'' if said.endswith('?') else '.'} `{self.prog} --help` lists what there is")

    @abstractmethod
    def refuse(self, why: str) -> NoReturn:
        """End the program with the message `why`: a sentence or two, without the program's name."""


def in_words(message: str) -> str:
    """Return argparse's error message, reworded: for an invalid choice it says which choice was probably meant."""
    message = message.replace("argument -", "flag -", 1)
    if found := _CHOICE.search(message):
        return message[: found.start()] + none_of(found[1].strip("'"), [one.strip("'") for one in found[2].split(", ")])
    return message


def unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """Return the message about an argument that this command and its subcommands do not take."""
    word = word.partition("=")[0]
    options = options_of(parser)
    otherwise = f". `{parser.prog} --help` lists what there is{getattr(parser, 'elsewhere', '')}"
    if (other := _ELSEWHERE.get(word)) in options:
        near = f". Did you mean {other!r}?"
    else:
        near = did_you_mean(word, options, otherwise) if word.startswith("-") else otherwise
    return f"unknown argument {word!r}{near}"


def first_unknown(argv: Sequence[str], parser: argparse.ArgumentParser) -> str | None:
    """Return the first flag on the command line that the command does not take, or None.

    argparse reports a missing argument before an unknown one, and one misspelt flag causes both errors.
    """
    options = [*parser._option_string_actions, *options_of(parser)]
    for word in argv:
        if word == "--":
            break
        name = word.partition("=")[0]
        if len(name) < 2 or name[0] != "-" or _NEGATIVE.match(name) or name in options:
            continue
        if name[1] != "-" and name[:2] in options:  # a short flag with its value, as in -n3
            continue
        if not (parser.allow_abbrev and any(option.startswith(name) for option in options)):
            return word
    return None


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long flags of a command and of its subcommands."""
    found = [option for option in parser._option_string_actions if option.startswith("--")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found += options_of(inner)
    return found


def before_command(word: str, prog: str) -> str:
    """Return the message about a flag that stands where the name of a subcommand belongs."""
    example = f"a command comes first, as in `{prog} COMMAND {word}`"
    return f"unknown argument {word!r}: {example}. `{prog} --help` lists them"


HELP_AND_VERSION = ("-h", "--help", "-V", "--version")  # the flags that need no command
