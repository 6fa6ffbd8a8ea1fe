"""The ways to pass a prompt's KV cache on: the bodies of a request's two legs (prefill and decode).

`Transfer` has what all kinds have in common; each kind is a subclass with its differences. A transfer is stateless, and
there is one object of each kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import orjson

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# The fields that limit the answer in each API; the first is set if the client gave none.
_LIMITS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}
PATHS = frozenset(_LIMITS)  # a request posted to these can have two legs, or fetch its beginning from a peer
# Fields about the rest of the answer: refused with a limit of one token, or a waste in the first leg's answer.
_LATER = ("stream_options", "min_tokens", "return_token_ids", "logprobs", "top_logprobs", "echo")


class Meeting(NamedTuple):
    """The place where the decoding engine finds the one that computes its prompt, while it is computed."""

    host: str
    port: int
    engine: str  # the id of the engine


class Transfer(ABC):
    """A way in which engines of one kind pass a prompt's KV cache on.

    The first leg goes to the replica that computes the prompt, the second to the one that writes the answer, whose
    bytes the client gets. By default the second leg follows the first: what `parameters` reads in the first answer goes
    into the second body. With a `header` the gateway sends the request once.
    """

    id = ""  # for operators: `#transfer=ID` in a replica's URL
    name = ""  # for messages
    lease_seconds = 30.0  # how long the first replica keeps the cache for the second to fetch
    # The request goes once, to a proxy in front of the second replica, and this header names the first (HOST:PORT),
    # which is to compute the prompt; b"" if the gateway sends both legs. With a header `first_body` only decides
    # whether a request can be split, and `parameters` is not called.
    header = b""
    # The fields of `replicas.pairing.Traits` that have to be equal for one engine to fetch from another, besides block
    # sizes that fit; () if unknown.
    compares: tuple[str, ...] = ()

    @abstractmethod
    def first_body(self, path: str, body: bytes) -> bytes | None:
        """Return the first leg's body: the same prompt for one token, not streamed; None if it cannot be split."""

    def parameters(self, answer: bytes) -> bytes | None:
        """Return what the second leg needs from the first one's answer, as members of a JSON object.

        None if the engine did not keep the cache; b"" if the answer ended with its first token, so that no second leg
        is needed. Raises ValueError if `answer` is not a valid answer.
        """
        return None

    def fetched_from(self, parameters: bytes) -> str:
        """Return where the second replica fetches the cache, HOST:PORT from `parameters`; "" if they do not say."""
        return ""

    def second_body(self, body: bytes, parameters: bytes) -> bytes:
        """Return the second leg's body: the client's, with the source of the cache."""
        return with_first(body, parameters)


class MeetingTransfer(Transfer):
    """A transfer whose legs are sent at once: both bodies get what the engines need to find each other."""

    meets_at: int  # the port of a replica's bootstrap server if its URL gives none
    ids_path: str  # the path that reports the ids of the engines there

    @abstractmethod
    def meet(self, meeting: Meeting) -> tuple[bytes, bytes]:
        """Return members of the two legs' JSON objects with which the engines find each other.

        Each call makes a new rendezvous: a failed one is never reused.
        """

    @abstractmethod
    def engine_ids(self, told: dict[str, Any]) -> dict[int, str]:
        """Return the engines' ids by data-parallel rank, from the answer of `ids_path`."""


def one_token(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Change a request to one token, not streamed, and return it."""
    limits = _LIMITS[path]
    for name in _LATER:
        request.pop(name, None)
    request |= dict.fromkeys([name for name in limits if name in request] or limits[:1], 1)
    request["stream"] = False
    if path == RESPONSES:
        request["store"] = False
    return request


def one_sequence(body: bytes, field: str) -> dict[str, Any] | None:
    """Return the request in a body, or None if it cannot be split.

    Several sequences cannot share one transfer, and a request with `field` is already a leg of another gateway's.
    """
    request = json_object(body)
    if request is None or field in request or request.get("n") not in (None, 1):
        return None
    return None if request.get("use_beam_search") or request.get("background") else request


def with_first(body: bytes, members: bytes) -> bytes:
    """Return a JSON object with these members in front; the rest is not serialized again."""
    at = body.index(b"{") + 1
    return b"".join((body[:at], members, b",", body[at:]))


def json_object(text: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
