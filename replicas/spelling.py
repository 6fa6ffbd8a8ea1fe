"""The search for the known name that a misspelt name probably means, for all messages that ask "Did you mean?"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that `word` probably misspells, or "".

    `cutoff`: the least similarity that counts, from 0 to 1. If exactly one name has `word` as a part between dashes,
    that name is preferred to more similar ones: for --rate the result is --request-rate, not --trace.
    """
    bare = {name.lstrip("-"): name for name in known}  # the common dashes of flags would raise their similarity
    whole = word.lstrip("-")
    longer = [name for name in bare if whole in name.split("-")]
    near = longer if len(longer) == 1 else difflib.get_close_matches(whole, bare, 1, cutoff)
    return bare[near[0]] if near else ""


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return `. Did you mean 'X'?` to end a message with, or `otherwise` if no known name is similar to `word`."""
    near = closest(word, known)
    return f". Did you mean {near!r}?" if near else otherwise


def known_or_meant(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the name that was probably meant, or else all known names."""
    names = list(known)
    return did_you_mean(word, names, f". Known: {', '.join(names)}")


def none_of(given: object, known: Iterable[str]) -> str:
    """Return the message that a value is none of the known ones."""
    names = list(known)
    if given is None or given == "":
        return f"it has no value; name one of {', '.join(names)}"
    return f"{given!r} is none of {', '.join(names)}{did_you_mean(str(given), names)}"
