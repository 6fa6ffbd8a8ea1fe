"""What is wrong with a command line, in words that say what would be right: for every command of the house.

argparse names the type that it could not make ("invalid int value"), lists choices without the one that was probably
meant, and says of a flag that it does not know no more than that.
"""

import argparse
import difflib
import errno
import re
import socket
from collections.abc import Sequence

_NUMBER = re.compile(r"invalid (int|float) value: (.+)")
_NOTHING = re.compile(r"argument (--[\w-]+)\S*: expected one argument")
_ELSEWHERE = {"--replicas": "--launch", "--launch": "--replicas"}  # what another command calls the same thing
_CHOICE = re.compile(r"invalid choice: (.+) \(choose from (.+)\)")


def in_words(message: str) -> str:
    """argparse's message, with what it says of numbers and choices said plainly."""
    if found := _NUMBER.search(message):
        kind = "no whole number" if found[1] == "int" else "no number"
        return f"{message[: found.start()]}{found[2]} is {kind}"
    if found := _NOTHING.search(message):  # what begins with a dash is taken for a flag
        return f"{message}, and none follows; one that begins with a dash is written as {found[1]}=-1"
    if found := _CHOICE.search(message):
        choices = [choice.strip("'") for choice in found[2].split(", ")]
        return f"{message[: found.start()]}{found[1]} is none of {', '.join(choices)}{meant(found[1].strip(chr(39)), choices)}"
    return message


def meant(word: str, known: list[str]) -> str:
    """`. Did you mean 'X'?`, or nothing."""
    near = difflib.get_close_matches(word, known, 1, 0.6)
    return f". Did you mean {near[0]!r}?" if near else ""


def unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """About an argument that this command, or the one within it, does not take."""
    word = word.partition("=")[0]
    options = options_of(parser)
    if (elsewhere := _ELSEWHERE.get(word)) in options:
        near = f". Did you mean {elsewhere!r}?"
    else:
        near = meant(word, options) if word.startswith("-") else ""
    return f"unknown argument {word!r}" + (near or f". `{parser.prog} --help` lists what there is")


def first_unknown(argv: Sequence[str], parser: argparse.ArgumentParser) -> str | None:
    """The first of a command's flags that it does not take, not even abbreviated. argparse says of what is missing
    before it says of what is too much, and one misspelt flag is both."""
    options = options_of(parser)
    for word in argv:
        if word == "--":
            break
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in options):
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


def cannot_listen(host: str, port: int, error: OSError, port_flag: str = "--port", host_flag: str = "--host") -> str:
    """Why nobody can listen there, and what to do about it."""
    said = f"cannot listen on {host}:{port}: {error.strerror or error}. "
    if isinstance(error, socket.gaierror) or error.errno == errno.ENODEV:
        return f"{said}{host} does not resolve: give an address of this machine with {host_flag}, or 0.0.0.0 for all"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{said}No interface of this machine has that address: give one of its own with {host_flag}, or 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return f"{said}This user may not take that port: give one above 1023 with {port_flag}"
    return f"{said}Stop what holds the port, or give another with {port_flag} (and {host_flag})"
