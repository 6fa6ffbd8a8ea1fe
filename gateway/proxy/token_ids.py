"""What is known of the token ids that one replica's process makes, and how it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import orjson

from replicas.ask import body_of

from ..prompt.forward import written

CONFIRMATIONS = 3  # different bodies of a kind that a replica must have made the same ids of
# Bodies of a confirmed kind, of which one is checked: its text and the check cost a hundredth of what is saved
CHECK_EVERY = 100
# Known of a replica, of 600 characters at most each; the one that was not seen for longest is forgotten
MOST_KINDS = 256
PAUSE_SECONDS = 30.0  # before a check that was not answered is made again, of that kind
ANSWER_SECONDS = 60.0
# How long an answer gets and what it is made of; one token is asked for in their place.
_OUTPUT = frozenset(
    """
    max_tokens max_completion_tokens min_tokens n best_of stream stream_options request_id priority
    """.split()
)
_COMPLETIONS = "/v1/completions"
PATHS = ("/v1/chat/completions", _COMPLETIONS)

Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]  # (path, body) -> (status, reply)
_NOTHING = msgspec.Raw(b"null")


class Unanswered(Exception):
    """A check told nothing either way."""


class Different(Exception):
    """The engine made other ids than the gateway."""


class _Choice(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = _NOTHING


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Reply(msgspec.Struct):
    """Of a reply as much as shows what the engine did. Ids stay as they came: 100,000 as Python ints take 10 ms, in
    which no other thread has a turn."""

    choices: list[_Choice] | None = None
    prompt_token_ids: msgspec.Raw = _NOTHING
    usage: _Usage | None = None


async def check_ids(post: Post, path: str, body: bytes, ids: bytes) -> str:
    """Ask an engine for the ids it makes of this body; they must be these (uint32 LE).

    Returns "", or why the engine cannot be asked that. Raises Different or Unanswered.
    """
    status, reply = await post(path, await asyncio.to_thread(_asking_for_ids, body))
    if status != 200:
        raise Unanswered(f"status {status}")
    return await asyncio.to_thread(_compare, reply, ids)


async def takes_ids(post: Post, path: str, model: str, first: bytes, around: tuple[bytes, bytes] | None) -> str:
    """Send an engine one id (uint32 LE) in place of a text: "", or what shows that it does not use it. Raises
    Unanswered. `around`: as of `with_ids`."""
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
    bare = {name: value for name, value in orjson.loads(body).items() if name not in _OUTPUT}
    return orjson.dumps({**bare, "max_tokens": 1, "return_token_ids": True})


def _compare(reply: bytes, ids: bytes) -> str:
    told = _read(reply)
    theirs = bytes(told.prompt_token_ids)
    if not theirs.startswith(b"[") and told.choices:  # of completions, and with some engines of chats
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
    """What is known of one kind of body at one replica."""

    __slots__ = ("bodies", "left", "pause")

    def __init__(self) -> None:
        self.bodies: set[int] = set()  # digests of the ids that were confirmed, until they are enough
        self.left = 0  # how many more are forwarded before one is checked
        self.pause = 0.0  # no check before


class Forwarding:
    """What is known of one replica's process."""

    __slots__ = (
        "incarnation",
        "made_by",
        "rejected_because",
        "accepts",
        "silent_at",
        "kinds",
        "checking",
    )

    def __init__(self, incarnation: str | None = None):
        self.incarnation = incarnation
        self.made_by = 0  # the way of making ids of which the kinds are known
        self.rejected_because: dict[str, str] = {}  # by path
        self.accepts: set[str] = set()  # paths at which it was seen to use ids
        # APIs (`Exchange.label`) at which it refuses to be asked for the ids that it writes
        self.silent_at: set[str] = set()
        self.kinds: dict[tuple[str, str], BodyKind] = {}  # by path and kind of body, the one seen last at the end
        self.checking: asyncio.Task[None] | None = None

    def says(self) -> str:
        """For people: the status page, the log, doctor."""
        confirmed = {path for (path, _), kind in self.kinds.items() if len(kind.bodies) >= CONFIRMATIONS}
        told = dict.fromkeys(confirmed, "yes") | {path: f"no, {why}" for path, why in self.rejected_because.items()}
        return "; ".join(f"{path}: {what}" for path, what in sorted(told.items())) or "not tried yet"

    def seen(self, path: str, name: str) -> BodyKind | None:
        """A body of this kind goes to the replica: what is known of the kind, None if this is its first."""
        found = self.kinds.pop((path, name), None)
        self.kinds[path, name] = found or BodyKind()
        if len(self.kinds) > MOST_KINDS:
            del self.kinds[next(iter(self.kinds))]
        return found


def poster(session: aiohttp.ClientSession) -> Post:
    """POST to the session's base URL."""

    async def post(path: str, body: bytes) -> tuple[int, bytes]:
        try:
            headers = {"content-type": "application/json"}
            async with session.post(path, data=body, headers=headers, allow_redirects=False) as response:
                return response.status, await body_of(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unanswered(str(error) or type(error).__name__) from None

    return post
