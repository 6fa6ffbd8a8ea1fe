"""The command `hitherto key new NAME`: a new API key, and the line that the key file needs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from ..settings import ConfigError, flag, load
from .key_file import Entry, KeyFileError, add, digest, new_key, new_salt, what_is_wrong
from .limits import KINDS, WORDS, Limits

ABOUT = "Its hash goes into the file of --api-keys, and the key itself to the client."
DESCRIPTION = """Make an API key for a tenant. The key is printed once, to standard output, and kept nowhere;
the line for the file of --api-keys, which holds only its hash, follows, or is added to --file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    new = verbs.add_parser("new", help="make a key", description=DESCRIPTION)
    new.add_argument("name", metavar="NAME", help="the tenant's name, as logs and metrics show it")
    new.add_argument("--file", type=Path, help="add the line to this file of --api-keys, in place of printing it")
    new.add_argument("--models", metavar="NAME,...", help="the served models it may use (default: all)")
    salted = "a cache_salt of its own: nobody else finds what its requests cached"
    new.add_argument("--own-cache", action="store_true", help=salted)
    for name in Limits._fields:
        new.add_argument(flag(name), type=int, metavar="N", help=f"limit: {WORDS[KINDS[name]]}")
    new.add_argument("--class", dest="class", metavar="NAME", help="the class of its requests")
    settings = "the gateway's settings, which must have that class (default: as serve)"
    new.add_argument("--config", type=Path, metavar="FILE", help=settings)


def run(args: argparse.Namespace) -> int:
    """Print a new API key, print the line for the key file or add it to --file, and return the exit code 0.

    Raises ConfigError for arguments that cannot be used, or a file that cannot be added to.
    """
    key = new_key()
    fields = {"name": args.name, "sha256": digest(key).hex()}
    for name in ("models", "class", *Limits._fields):
        if (value := getattr(args, name)) is not None:
            fields[name] = [one for one in value.split(",") if one] if name == "models" else value
    if args.own_cache:
        fields["cache_salt"] = new_salt()
    try:
        entry = Entry.model_validate(fields)
    except ValidationError as error:
        item = error.errors()[0]
        name = str(item["loc"][0])
        place = "argument NAME" if name == "name" else f"flag {flag(name)}"
        raise ConfigError(f"{place}: {what_is_wrong(name, item)}") from None
    known: list[str] = []
    if entry.qos_class is not None:
        known = load(file=args.config, without_files=True).settings.class_names
    if known and entry.qos_class not in known:
        raise ConfigError(
            f"flag --class: there is no class {entry.qos_class!r}; name one of scheduler.qos_classes: {', '.join(known)}"
        )
    if args.file is not None:
        try:
            add(args.file, entry)
        except KeyFileError as error:
            raise ConfigError(f"flag --file: {error}") from None
    print("The key, which is shown now and never again:\n", file=sys.stderr)
    print(key, flush=True)
    if args.file is None:
        print("\nThe line for the file of --api-keys, which is read again when it changes:\n", file=sys.stderr)
        print(entry.line())
    return 0
