"""Checks whether a replica's process makes the same token ids of a prompt as the gateway, and their results so far."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import orjson

from replicas.ask import body_of

from ...prompt.forward import written

# How many different bodies of a kind a replica must have made the same ids of, before it is sent ids. A kind is given
# by the template, whether there are tools, and the shape of the content.
CONFIRMATIONS = 3
# Of a confirmed kind, one body in so many is sent as text and checked: that costs a hundredth of what ids save.
CHECK_EVERY = 100
# Kinds kept per replica, of 600 characters at most each; the least recently seen one is dropped.
MOST_KINDS = 256
PAUSE_SECONDS = 30.0  # how long no body of a kind is checked after a check that got no answer
ANSWER_SECONDS = 60.0  # how long a check waits for its answer
# Members of a body that govern the answer's length and form: a check leaves them out, and requests one token.
_OUTPUT = frozenset(
    "max_tokens max_completion_tokens min_tokens n best_of stream stream_options request_id priority".split()
)
_COMPLETIONS = "/v1/completions"
PATHS = ("/v1/chat/completions", _COMPLETIONS)

Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]  # (path, body) -> (status, reply)
_NOTHING = msgspec.Raw(b"null")


class Unanswered(Exception):
    """Raised by a check that did not show whether the ids are the same, since it got no usable answer."""


class Different(Exception):
    """Raised by a check that showed that the engine makes other ids than the gateway."""


class _Choice(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = _NOTHING


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Reply(msgspec.Struct):
    """The part of an engine's reply to a check that shows which token ids it has made or used.

    The ids stay raw JSON: to parse 100,000 of them to Python ints takes 10 ms, during which no other thread runs.
    """

    choices: list[_Choice] | None = None
    prompt_token_ids: msgspec.Raw = _NOTHING
    usage: _Usage | None = None


async def check_ids(post: Post, path: str, body: bytes, ids: bytes) -> str:
    """Have an engine report the token ids that it makes of a body's prompt, and compare them with the gateway's.

    Returns "" if they are the same, or in words why this engine cannot be checked. Raises Different if they are not the
    same, and Unanswered if there is no usable answer.

    `ids`: the gateway's ids, as uint32 in little endian.
    """
    status, reply = await post(path, await asyncio.to_thread(_asking_for_ids, body))
    if status != 200:
        raise Unanswered(f"status {status}")
    return await asyncio.to_thread(_compare, reply, ids)


async def takes_ids(post: Post, path: str, model: str, first: bytes, around: tuple[bytes, bytes] | None) -> str:
    """Send an engine a prompt of one token id; return "" if it uses the id, else in words what shows that it does not.

    Raises Unanswered if there is no usable answer.

    `first`: the id, as uint32 in little endian.
    `around`: the bytes before and after the ids in a chat's body; None if engines of this kind take no ids in chats.
    """
    one: dict[str, Any] = {**({"model": model} if model else {}), "max_tokens": 1}
    ids = [int.from_bytes(first, "little")]
    if path == _COMPLETIONS:
        one["prompt"] = ids
    elif around is None:
        return "engines of its kind take none beside messages"
    else:
        one["messages"] = [{"role": "user", "content": "one two three four"}]
        one |= orjson.loads(b"".join((b"{", around[0], orjson.dumps(ids), around[1], b"}")))
    status, reply = await post(path, orjson.dumps(one))
    if status >= 500:
        raise Unanswered(f"status {status}")
    if status != 200:
        return f"it refuses ids with status {status}"
    usage = _read(reply).usage
    counted = usage.prompt_tokens if usage else None
    return "" if counted == 1 else f"it does not use ids: of a prompt of one it counts {counted} tokens"


def _asking_for_ids(body: bytes) -> bytes:
    """Return a body for the same prompt that asks for one token and for the prompt's token ids."""
    bare = {name: value for name, value in orjson.loads(body).items() if name not in _OUTPUT}
    return orjson.dumps({**bare, "max_tokens": 1, "return_token_ids": True})


def _compare(reply: bytes, ids: bytes) -> str:
    """Compare the token ids in an engine's reply with the gateway's, and return the result of `check_ids`.

    Raises Different or Unanswered. `ids`: the gateway's ids, as uint32 in little endian.
    """
    told = _read(reply)
    theirs = bytes(told.prompt_token_ids)
    if not theirs.startswith(b"[") and told.choices:  # here engines report them in completions, some also in chats
        theirs = bytes(told.choices[0].prompt_token_ids)
    if not theirs.startswith(b"["):
        return "it does not tell the ids it makes (return_token_ids), so nothing shows that ours are the same"
    if theirs.translate(None, b" \t\r\n") == written(ids):
        return ""
    here, there = [*memoryview(ids).cast("I")], orjson.loads(theirs)
    at = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    raise Different(f"the ids it makes differ from ours at {at} (of {len(here)} here, {len(there)} there)")


def _read(reply: bytes) -> _Reply:
    try:
        return msgspec.json.decode(reply, type=_Reply)
    except msgspec.DecodeError as error:
        raise Unanswered(f"the reply is not such as was asked for: {error}") from None


class BodyKind:
    """The state of the checks of one kind of body at one replica.

    Bodies of a kind have the same template, the same use of tools and the same shape of content.
    """

    def __init__(self) -> None:
        self.bodies: set[int] = set()  # digests of confirmed ids, up to CONFIRMATIONS
        self.left = 0  # bodies to forward as ids before the next check
        self.pause = 0.0  # no check before this time, in monotonic seconds


class Forwarding:
    """The state of the forwarding of token ids to one replica's process."""

    def __init__(self, incarnation: str | None = None):
        self.incarnation = incarnation
        self.made_by = 0  # the gateway's way of making ids, by its number, for which `kinds` are valid
        self.rejected_because: dict[str, str] = {}  # path -> why ids are not forwarded there
        self.accepts: set[str] = set()  # paths at which it was seen to use ids
        # APIs (`Exchange.label`) at which it refuses to report the token ids of its output
        self.silent_at: set[str] = set()
        self.kinds: dict[tuple[str, str], BodyKind] = {}  # (path, kind of body) -> state, most recently seen last
        self.checking: asyncio.Task[None] | None = None

    def says(self) -> str:
        """Return in words whether ids are forwarded, by path, for the status page, the log and `hitherto doctor`."""
        confirmed = {path for (path, _), kind in self.kinds.items() if len(kind.bodies) >= CONFIRMATIONS}
        told = dict.fromkeys(confirmed, "yes") | {path: f"no, {why}" for path, why in self.rejected_because.items()}
        return "; ".join(f"{path}: {what}" for path, what in sorted(told.items())) or "not tried yet"

    def seen(self, path: str, name: str) -> BodyKind | None:
        """Note that a body of the kind `name` came at this path, and return the state of the kind.

        Returns None for the first body of a kind.
        """
        found = self.kinds.pop((path, name), None)
        self.kinds[path, name] = found or BodyKind()
        if len(self.kinds) > MOST_KINDS:
            del self.kinds[next(iter(self.kinds))]
        return found


def poster(session: aiohttp.ClientSession) -> Post:
    """Return a function that POSTs JSON to paths below the session's base URL; it raises Unanswered."""

    async def post(path: str, body: bytes) -> tuple[int, bytes]:
        try:
            headers = {"content-type": "application/json"}
            async with session.post(path, data=body, headers=headers, allow_redirects=False) as response:
                return response.status, await body_of(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unanswered(str(error) or type(error).__name__) from None

    return post
