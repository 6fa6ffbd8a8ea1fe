"""Comparison of the gateway's tokenizer with an engine's, by fixed texts that both tokenize.

The engine is asked for the token ids of each text, without and with the special tokens that its tokenizer adds. The
texts hold what tokenizers treat differently: scripts, digits, leading and repeated blanks, line ends, contractions,
composed and decomposed letters, and the model's own special tokens with text before, after and between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..render.program import UNSPOKEN
from .tokenizer import Tokenizer

_TEXTS = (
    "Hello, world! The quick brown fox doesn't jump; they'll say it's over.",
    "HELLO WORLD'S CamelCase snake_case kebab-case http://example.com/a?b=c#d user@example.org",
    " one leading blank", "   three leading blanks,  two inside, one behind ", "\tdef f(x):\n\t\treturn x ** 2  # comment\n",
    "\n\nline\r\nline\r\r\n\n\n   indented\n ", "0 7 42 365 1024 65536 3.14159 1,234,567 1e10 0x1F",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8 \ud55c\uad6d\uc5b4 \ubb38\uc7a5\uff01",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5 "
    "\u0540\u0561\u0575\u0565\u0580\u0565\u0576 \u10e5\u10d0\u10e0\u10d7\u10e3\u10da\u10d8",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0a38\u0a24 \u0bb5\u0ba3\u0b95\u0bcd\u0b95\u0bae\u0bcd "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u1019\u1004\u103a\u1039\u1002\u101c\u102c \u12a0\u121b\u122d\u129b",
    "na\u00efve e\u0301tude \u00c5ngstr\u00f6m A\u030angstro\u0308m \ufb01ne \u2126 \u00bd \u00b2 \uff21\uff22\uff23 \u1e9e\u00df",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2581 \u00a0 \u200b \ufeff \x7f",
    "{\"key\": [1, 2.5, null, true], \"s\": \"a\\n\\u00e9\"} <tag attr='v'/> $x^2 + y_1$ \u201cquoted\u201d \u2014 \u2026",
)  # fmt: skip
_MOST_TOKENS = 10  # the most special tokens that get a separate text
# The most texts that the model's files call tokens although the gateway has no such token, and characters of one.
_MOST_STRANGE, _LONGEST = 64, 64


_NONE: Mapping[str, str] = MappingProxyType({})


class Differences(NamedTuple):
    """The differences that were found between the engines' tokens and the gateway's.

    The values of `texts`, `chats` and `bodies` are the reasons, in words.
    """

    texts: Mapping[str, str] = _NONE  # by model name: why all prompts differ
    chats: Mapping[str, str] = _NONE  # by model name: why conversations differ
    # By a set of features (`prompt.features`): why bodies that have all of these features differ.
    bodies: Mapping[frozenset[str], str] = MappingProxyType({})
    # Sets of features: a body that has all features of a set is still treated as exact, but the gateway does not refuse
    # it for its token count.
    doubted: Collection[frozenset[str]] = ()
    shown: bool = False  # an engine's ids of all fixed test chats have equalled the gateway's (`ops.chats`)
    # The time zones in which the engines' dates may be, in quarters of an hour from UTC; None: no engine was asked.
    zones: frozenset[int] | None = None
    days: str = ""  # why the engines' date is uncertain, or ""


class Answer(NamedTuple):
    """An engine's token ids for one of the fixed texts."""

    text: str
    special: bool  # whether the ids include the special tokens that the engine's tokenizer adds
    ids: Sequence[int]


def fixed_texts(tokenizer: Tokenizer, named: Mapping[str, str], mentioned: Iterable[str] = ()) -> list[str]:
    """Return the texts that an engine and the gateway both tokenize, to compare their token ids.

    `named`: the special tokens that a template may print, by name. `mentioned`: all texts that the model's files call a
    token. An engine may treat some of these as tokens although the gateway does not, and ordinary texts would not show
    this.
    """
    # The character UNSPOKEN at the start of a name keeps texts from spelling the token; without it the name is an
    # ordinary text.
    added = [token["content"].removeprefix(UNSPOKEN) for token in tokenizer.added_tokens]
    some = added[:: max(1, len(added) // (_MOST_TOKENS // 2))]
    tokens = list(dict.fromkeys([*named.values(), *some, *added[-1:]]))[:_MOST_TOKENS]
    known = set(added)
    strange = [one for one in dict.fromkeys(mentioned) if one not in known and 1 < len(one) <= _LONGEST][:_MOST_STRANGE]
    rows = [strange[at : at + 8] for at in range(0, len(strange), 8)]
    return [
        *_TEXTS,
        *(f"{token}x a {token} b{token}{token}\n{token} c" for token in tokens),
        *(" x".join(row) for row in rows),
    ]


def difference(tokenizer: Tokenizer, answers: Iterable[Answer]) -> str:
    """Return a description of the first text whose token ids differ between the gateway and the engine, or "".

    `answers`: the engine's ids of the fixed texts.
    """
    for text, special, theirs in answers:
        ours = memoryview(tokenizer.encode(text, special)).cast("I").tolist()
        if ours != list(theirs):
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            return (
                f"{text[:40]!r} is {ours[at : at + 4]} here from token {at} on, and {list(theirs[at : at + 4])} there"
            )
    return ""
