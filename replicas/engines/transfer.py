"""How engines pass a prompt's KV cache on: what is written into the two legs of a request.

`Transfer` is what all ways have in common; each way is a subclass that states what is otherwise there. A way has no
state, and there is one object of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import orjson

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# What limits the answer of each API; the first is written where the client gives none.
_LIMITS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}
PATHS = frozenset(_LIMITS)  # posted to these, a request can have two legs, or take its beginning from a peer
# What speaks of the rest of the answer: it would be refused beside a limit of one token, or makes the answer larger.
_LATER = ("stream_options", "min_tokens", "return_token_ids", "logprobs", "top_logprobs", "echo")


class Meeting(NamedTuple):
    """Where the engine that writes an answer finds the one that computes its prompt, while that computes it."""

    host: str
    port: int
    engine: str  # the id of the engine


class Transfer(ABC):
    """How engines of one kind pass a prompt's KV cache on. The first leg goes to the replica that computes the prompt,
    the second to the one that writes the answer, whose bytes the client gets.

    By default one leg follows the other: what `parameters` reads in the first one's answer goes into the second one's
    body. Where there is a `header` the gateway sends the request once.
    """

    id = ""  # for operators: `#transfer=ID` behind a replica's URL
    name = ""  # for people
    lease_seconds = 30.0  # the first replica keeps the cache so long for the second one to fetch
    # A request goes once, to what stands before the second replica, and this header of it names the first one
    # (HOST:PORT), where the prompt is to be computed; b"" where the gateway sends both legs. Of such a way `first_body`
    # only says whether a request can have legs, and `parameters` is not asked.
    header = b""
    # What of `replicas.pairing.Traits` has to be the same in two engines, for one to fetch from the other, and block
    # sizes that fit; () where that is not known.
    compares: tuple[str, ...] = ()

    @abstractmethod
    def first_body(self, path: str, body: bytes) -> bytes | None:
        """The first leg's body: of the same prompt, one token, in one piece, to be passed on. None: this request can
        have no legs."""

    def parameters(self, answer: bytes) -> bytes | None:
        """What the second leg needs of the first one's answer, as members of a JSON object; None where the engine did
        not keep the cache, b"" where there is nothing to go on with, since the answer ended with its first token.
        Raises ValueError if that is no answer at all."""
        return None

    def fetched_from(self, parameters: bytes) -> str:
        """Where the second replica connects to for the cache, HOST:PORT by what the first one says; "" if it does not
        say that."""
        return ""

    def second_body(self, body: bytes, parameters: bytes) -> bytes:
        """The second leg's body, which is the client's but for where the cache comes from."""
        return with_first(body, parameters)


class MeetingTransfer(Transfer):
    """One whose legs are sent at once: what both need to find each other goes into both bodies."""

    meets_at: int  # the port at which a replica is met where its URL does not tell
    ids_path: str  # tells the ids of the engines there

    @abstractmethod
    def meet(self, meeting: Meeting) -> tuple[bytes, bytes]:
        """Members of the first and of the second leg's JSON object, with which the two find each other. Each call is
        another rendezvous: one that failed is never used again."""

    @abstractmethod
    def engine_ids(self, told: dict[str, Any]) -> dict[int, str]:
        """The engines' ids by data-parallel rank, by what `ids_path` tells."""


def one_token(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """The request, for one token in one piece. It is changed."""
    limits = _LIMITS[path]
    for name in _LATER:
        request.pop(name, None)
    request |= dict.fromkeys([name for name in limits if name in request] or limits[:1], 1)
    request["stream"] = False
    if path == RESPONSES:
        request["store"] = False
    return request


def one_sequence(body: bytes, field: str) -> dict[str, Any] | None:
    """The request that a body has; None where it can have no legs: several sequences cannot share one transfer, and one
    that brings `field` is another gateway's leg."""
    request = json_object(body)
    if request is None or field in request or request.get("n") not in (None, 1):
        return None
    return None if request.get("use_beam_search") or request.get("background") else request


def with_first(body: bytes, members: bytes) -> bytes:
    """A JSON object with these members in front, as it was received else: the prompt is not written again."""
    at = body.index(b"{") + 1
    return b"".join((body[:at], members, b",", body[at:]))


def json_object(text: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
