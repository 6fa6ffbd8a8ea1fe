"""Tokenize once: which replicas get the token ids that routing found, and what shows that they may.

An engine that was sent ids can't tell that they are wrong: with another template or tokenizer than ours it would answer
a prompt that nobody wrote. So none is trusted by its version. A long request goes to a new replica as received; once
answered, that replica is asked about it again, for one token and for the ids it made itself (the prompt is cached by
then, so this costs it a rendering). They must be ours, and a request that brings one id must count one token, not
those of its text. From then on it gets ids; each AGAIN requests the same is shown anew, and wherever usage is told it
must agree. The first contradiction ends it for this replica until another process is behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import orjson

from ..prompt.forward import with_ids, written

if TYPE_CHECKING:
    from ..telemetry.metrics import Metrics
    from .backend import Backend
    from .life import Life
    from .usage import Usage

log = logging.getLogger("hitherto.dispatch")

AGAIN = 1000
PAUSE_SECONDS = 30.0  # before a trial that was not answered is made again
ANSWER_SECONDS = 60.0
# How long an answer gets and what it is made of; one token is asked for in their place.
_OUTPUT = frozenset({"max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "stream", "stream_options", "request_id", "priority"})
_COMPLETIONS = "/v1/completions"

Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]  # (path, body) -> (status, reply)
_NOTHING = msgspec.Raw(b"null")


class Unanswered(Exception):
    """A trial told nothing either way."""


class _Choice(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = _NOTHING


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Reply(msgspec.Struct):
    """Of a reply as much as shows what the engine did. Ids stay as they came: 100,000 as Python ints take 10 ms, in which
    no other thread has a turn."""

    choices: list[_Choice] | None = None
    prompt_token_ids: msgspec.Raw = _NOTHING
    usage: _Usage | None = None


async def contradiction(post: Post, path: str, body: bytes, ids: bytes) -> str:
    """What keeps an engine from being sent these ids (uint32 LE) in place of this request's text, or "". Raises Unanswered."""
    model, again = await asyncio.to_thread(_asking_for_ids, body)
    status, reply = await post(path, again)
    if status != 200:
        raise Unanswered(f"status {status}")
    if against := await asyncio.to_thread(_difference, path, reply, ids):
        return against
    first = int.from_bytes(ids[:4], "little")
    one: dict[str, Any] = {"model": model, "max_tokens": 1}
    if path == _COMPLETIONS:
        one["prompt"] = [first]
    else:
        one["messages"] = [{"role": "user", "content": "one two three four"}]
        one["kv_transfer_params"] = {"prompt_token_ids": [first]}
    status, reply = await post(path, orjson.dumps(one))
    if status >= 500:
        raise Unanswered(f"status {status}")
    if status != 200:
        return f"it refuses ids with status {status}"
    usage = _read(reply).usage
    counted = usage.prompt_tokens if usage else None
    return "" if counted == 1 else f"it does not use ids: of a prompt of one it counts {counted} tokens"


def _asking_for_ids(body: bytes) -> tuple[str | None, bytes]:
    bare = {name: value for name, value in orjson.loads(body).items() if name not in _OUTPUT}
    return bare.get("model"), orjson.dumps({**bare, "max_tokens": 1, "return_token_ids": True})


def _difference(path: str, reply: bytes, ids: bytes) -> str:
    told = _read(reply)
    if path == _COMPLETIONS:
        theirs = bytes(told.choices[0].prompt_token_ids if told.choices else _NOTHING)
    else:
        theirs = bytes(told.prompt_token_ids)
    if not theirs.startswith(b"["):
        return "it does not tell the ids it makes (return_token_ids), so nothing shows that ours are the same"
    if theirs.translate(None, b" \t\r\n") == written(ids):
        return ""
    here, there = [*memoryview(ids).cast("I")], orjson.loads(theirs)
    at = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    return f"the ids it makes differ from ours at {at} (of {len(here)} here, {len(there)} there): another tokenizer or chat template"


def _read(reply: bytes) -> _Reply:
    try:
        return msgspec.json.decode(reply, type=_Reply)
    except msgspec.DecodeError as error:
        raise Unanswered(f"the reply is not such as was asked for: {error}") from None


class Once:
    """What is known of one replica's process, by path."""

    __slots__ = ("incarnation", "against", "left", "trying", "pause")

    def __init__(self, incarnation: str | None = None):
        self.incarnation = incarnation
        self.against: dict[str, str] = {}  # why not
        self.left: dict[str, int] = {}  # how many more get ids before the next trial
        self.trying: asyncio.Task[None] | None = None
        self.pause = 0.0  # no trial before

    def says(self) -> str:
        """For people: the status page, the log, doctor."""
        told = {path: "yes" for path in self.left} | {path: f"no, {why}" for path, why in self.against.items()}
        return "; ".join(f"{path}: {what}" for path, what in sorted(told.items())) or "not tried yet"


class TokenizeOnce:
    """The part of the dispatcher that decides between a prompt's text and its ids."""

    def __init__(self, metrics: Metrics, wanted: bool):
        self.metrics, self.wanted = metrics, wanted

    def body(self, life: Life) -> bytes:
        """What is sent to `life.backend`; a retry is always as received. Ids that nobody will ask for again are dropped:
        they are as large as the body, and the answer may take minutes."""
        prompt, backend, body = life.prompt, life.backend, life.request.body
        life.sent_ids = False
        if prompt is None:
            return body
        if not prompt.ids_suffice or not self.wanted:
            prompt.token_ids = b""
            return body
        once, path, limit = _once(backend), prompt.path, backend.replica.max_model_len
        # An engine that makes the ids refuses what is too long for its context; one that gets them would cut the answer.
        fits = limit is not None and prompt.tokens + max(1, prompt.max_tokens or 1) <= limit
        if fits and once.left.get(path, 0) > 0 and prompt.token_ids and not life.tried and life.ids_refused is None:
            spliced = with_ids(body, prompt)
            if spliced is not None:
                once.left[path] -= 1
                life.sent_ids, body = True, spliced
        if life.sent_ids or not _untried(once, path):
            prompt.token_ids = b""
        self.metrics.long_prompts.inc(backend.id, "ids" if life.sent_ids else "text")
        return body

    def settled(self, life: Life, usage: Usage) -> None:
        """A complete answer with status 200: does it agree, and may the replica be tried?"""
        prompt, backend = life.prompt, life.backend
        if life.ids_refused is backend:
            self._end(backend, prompt.path, "it refused a request with ids that it answered without")
        elif usage.prompt is not None and usage.prompt != prompt.tokens and prompt.mode == "exact" and not prompt.several:
            if prompt.path in _once(backend).left:
                self._end(backend, prompt.path, f"it counted {usage.prompt} tokens of a prompt that has {prompt.tokens} here")
        if not prompt.ids_suffice or not prompt.token_ids:
            return
        once = _once(backend)
        if _untried(once, prompt.path):
            given = life.request.header(b"authorization")
            headers = {**backend.replica.headers, **({"authorization": given} if given else {})}
            once.trying = asyncio.create_task(self._try(backend, once, prompt.path, life.request.body, prompt.token_ids, headers))

    async def _try(self, backend: Backend, once: Once, path: str, body: bytes, ids: bytes, headers: dict[str, str]) -> None:
        try:
            async with aiohttp.ClientSession(backend.replica.url, headers=headers, timeout=aiohttp.ClientTimeout(ANSWER_SECONDS)) as session:
                against = await contradiction(poster(session), path, body, ids)
        except Unanswered as error:
            once.pause = monotonic() + PAUSE_SECONDS
            log.info("replica %s: whether it takes token ids is not known yet: %s", backend.id, error)
            return
        finally:
            once.trying = None
        if backend.gone or once is not backend.once or path in once.against:
            return
        if against:
            self._end(backend, path, against)
            return
        if path not in once.left:
            log.info("replica %s takes token ids at %s: it need not tokenize long prompts again", backend.id, path)
        once.left[path] = AGAIN
        backend.replica.takes_ids = once.says()

    def _end(self, backend: Backend, path: str, why: str) -> None:
        once = _once(backend)
        if path not in once.against:
            once.left.pop(path, None)
            once.against[path] = why
            backend.replica.takes_ids = once.says()
            self.metrics.ids_refused.inc(backend.id)
            log.warning("replica %s gets prompts at %s as text from now on: %s", backend.id, path, why)


def _once(backend: Backend) -> Once:
    """What is known of the process that is behind the replica now."""
    once = backend.once
    if once.incarnation != backend.incarnation:
        once = backend.once = Once(backend.incarnation)
        backend.replica.takes_ids = once.says()
    return once


def _untried(once: Once, path: str) -> bool:
    """It is time for a trial."""
    return path not in once.against and not once.left.get(path) and once.trying is None and monotonic() >= once.pause


def poster(session: aiohttp.ClientSession) -> Post:
    """POST to the session's base URL."""

    async def post(path: str, body: bytes) -> tuple[int, bytes]:
        try:
            async with session.post(path, data=body, headers={"content-type": "application/json"}) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unanswered(str(error) or type(error).__name__) from None

    return post
