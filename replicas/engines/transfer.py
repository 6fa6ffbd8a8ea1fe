"""Transfers: the ways in which one engine passes a prompt's KV cache to another.

A request then has two legs: one replica computes the prompt (prefill), and another fetches the cache and writes the
answer (decode). A `Transfer` makes the request bodies of both legs; each way is a subclass. Transfers are stateless,
and there is one object of each.
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
PATHS = frozenset(_LIMITS)  # a request posted to these can have two legs, or fetch its beginning from another engine
# Fields about the answer, which the first leg must not have, as it only computes the prompt: engines refuse these
# fields with a limit of one token, or waste work on them.
_LATER = ("stream_options", "min_tokens", "return_token_ids", "logprobs", "top_logprobs", "echo")


class Meeting(NamedTuple):
    """The address and the id of the engine that computes a prompt while the decoding engine waits for its KV cache."""

    host: str
    port: int
    engine: str  # the id of the engine


class Transfer(ABC):
    """A way in which engines of one kind pass a prompt's KV cache to each other.

    The first leg goes to the replica that computes the prompt, the second leg to the replica that writes the answer;
    the client gets the second answer. By default the second leg is sent after the first one: `parameters` reads where
    to fetch the cache in the first answer, and `second_body` puts it into the second body. With a `header` the gateway
    sends the request only once.
    """

    id = ""  # for operators: `#transfer=ID` in a replica's URL
    name = ""  # for messages
    lease_seconds = 30.0  # how long the first replica keeps the cache for the second to fetch
    # If set, the gateway sends the request once, to a proxy in front of the second replica, and this header says which
    # replica (HOST:PORT) computes the prompt; b"": the gateway sends both legs. With a header `first_body` only decides
    # whether a request can be split, and `parameters` is not called.
    header = b""
    # The fields of `replicas.pairing.Traits` that have to be equal for one engine to fetch from another, besides block
    # sizes, which have to fit; (): none are compared.
    compares: tuple[str, ...] = ()

    @abstractmethod
    def first_body(self, path: str, body: bytes) -> bytes | None:
        """Return the body of the first leg (prefill): the client's, changed to ask for one token and no stream.

        Returns None if the request cannot be split into two legs. `path`: the path of the request. `body`: the client's
        body.
        """

    def parameters(self, answer: bytes) -> bytes | None:
        """Return the part of the first leg's (prefill's) answer that the second leg (decode) needs, as JSON members.

        None if the engine did not keep the cache; b"" if the answer ended with its first token, so that no second leg
        is needed. Raises ValueError if `answer` is not a valid answer.
        """
        return None

    def fetched_from(self, parameters: bytes) -> str:
        """Return HOST:PORT where the second replica fetches the cache, from `parameters`; "" if they do not say."""
        return ""

    def second_body(self, body: bytes, parameters: bytes) -> bytes:
        """Return the body of the second leg (decode): the client's body with some JSON members added.

        `parameters`: these members, from the first leg's answer.
        """
        return with_first(body, parameters)


class MeetingTransfer(Transfer):
    """A KV transfer whose two legs (prefill and decode) are sent at the same time.

    Members of both bodies say how the engines find each other.
    """

    meets_at: int  # the port of a replica's bootstrap server, unless the replica's URL gives one
    ids_path: str  # the path that reports the ids of the engines there

    @abstractmethod
    def meet(self, meeting: Meeting) -> tuple[bytes, bytes]:
        """Return the JSON members by which two engines find each other, for the first and for the second body.

        Each call makes a new transfer id, as the id of a failed transfer must not be used again. `meeting`: the engine
        that computes the prompt.
        """

    @abstractmethod
    def engine_ids(self, told: dict[str, Any]) -> dict[int, str]:
        """Return the engines' ids by data-parallel rank, from the answer at `ids_path`."""


def one_token(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Change a request in place so that it asks for one token and no stream; return the request.

    `path`: the request's path, which decides the names of its fields.
    """
    limits = _LIMITS[path]
    for name in _LATER:
        request.pop(name, None)
    request |= dict.fromkeys([name for name in limits if name in request] or limits[:1], 1)
    request["stream"] = False
    if path == RESPONSES:
        request["store"] = False
    return request


def one_sequence(body: bytes, field: str) -> dict[str, Any] | None:
    """Return the request in a body, or None if it cannot be split into two legs.

    A request for several sequences cannot be split, as they cannot share one transfer. `field`: the name of the
    transfer's own field; a request that has this field is already a leg, made by another gateway.
    """
    request = json_object(body)
    if request is None or field in request or request.get("n") not in (None, 1):
        return None
    return None if request.get("use_beam_search") or request.get("background") else request


def with_first(body: bytes, members: bytes) -> bytes:
    """Return the JSON object in `body` with these members added in front, without serializing it again."""
    at = body.index(b"{") + 1
    return b"".join((body[:at], members, b",", body[at:]))


def json_object(text: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
