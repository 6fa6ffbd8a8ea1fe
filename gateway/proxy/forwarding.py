"""Forward token ids in place of text, to replicas that were shown to make the same ids themselves.

An engine that is sent ids cannot tell that they are wrong: with another template or tokenizer than the gateway's, or after
a mistake of the gateway's, it would answer a prompt that nobody wrote. So nothing is forwarded that the engine has not
confirmed, and what it confirmed is void when the gateway makes ids in another way. Bodies are sorted into kinds (`prompt.forward.kind_of`: template, tools or none, shape of the content). The
first body of a kind only makes it known: one that never comes again is not worth a check. Of each kind CONFIRMATIONS different bodies are sent to a replica as received; once answered, the replica is asked about them again, for one token and
for the ids it made itself (the prompt is cached by then, so this costs it a rendering), and those must be the gateway's.
From then on bodies of that kind are forwarded as ids, and one in CHECK_EVERY is sent as received and checked like the first ones. Besides,
wherever usage is told it must count the gateway's number of tokens.

The first difference ends it for the whole model, for all replicas: whose mistake it is cannot be seen from here, and if it
is the gateway's it reaches every replica. It begins again, with nothing confirmed, once the replica that differed is removed or another process is
behind it. A replica that does not take ids, or does not tell those it makes, gets text at that path until another
process is behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import orjson
from xxhash import xxh3_64_intdigest

from replicas.access import session_to

from ..prompt.forward import with_ids, written

if TYPE_CHECKING:
    from ..prompt import Prompt
    from ..ops.metrics import Metrics
    from .backend import Backend
    from .life import Life
    from .usage import Usage

log = logging.getLogger("hitherto.proxy")

CONFIRMATIONS = 3  # different bodies of a kind that a replica must have made the same ids of
CHECK_EVERY = 100  # bodies of a confirmed kind, of which one is checked: its text and the check cost a hundredth of what is saved
MOST_KINDS = 256  # known of a replica, of 600 characters at most each; the one that was not seen for longest is forgotten
PAUSE_SECONDS = 30.0  # before a check that was not answered is made again, of that kind
ANSWER_SECONDS = 60.0
# How long an answer gets and what it is made of; one token is asked for in their place.
_OUTPUT = frozenset({"max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "stream", "stream_options", "request_id", "priority"})
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
    """Of a reply as much as shows what the engine did. Ids stay as they came: 100,000 as Python ints take 10 ms, in which
    no other thread has a turn."""

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
    return await asyncio.to_thread(_compare, path, reply, ids)


async def takes_ids(post: Post, path: str, model: str, first: bytes, around: tuple[bytes, bytes] | None) -> str:
    """Send an engine one id (uint32 LE) in place of a text: "", or what shows that it does not use it. Raises Unanswered.
    `around`: as of `with_ids`."""
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


def _compare(path: str, reply: bytes, ids: bytes) -> str:
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
    raise Different(f"the ids it makes differ from ours at {at} (of {len(here)} here, {len(there)} there)")


def _read(reply: bytes) -> _Reply:
    try:
        return msgspec.json.decode(reply, type=_Reply)
    except msgspec.DecodeError as error:
        raise Unanswered(f"the reply is not such as was asked for: {error}") from None


class _Kind:
    """What is known of one kind of body at one replica."""

    __slots__ = ("bodies", "left", "pause")

    def __init__(self) -> None:
        self.bodies: set[int] = set()  # digests of the ids that were confirmed, until they are enough
        self.left = 0  # how many more are forwarded before one is checked
        self.pause = 0.0  # no check before


class Forwarding:
    """What is known of one replica's process."""

    __slots__ = ("incarnation", "made_by", "rejected_because", "accepts", "kinds", "checking")

    def __init__(self, incarnation: str | None = None):
        self.incarnation = incarnation
        self.made_by = 0  # the way of making ids of which the kinds are known
        self.rejected_because: dict[str, str] = {}  # by path
        self.accepts: set[str] = set()  # paths at which it was seen to use ids
        self.kinds: dict[tuple[str, str], _Kind] = {}  # by path and kind of body, the one seen last at the end
        self.checking: asyncio.Task[None] | None = None

    def says(self) -> str:
        """For people: the status page, the log, doctor."""
        confirmed = {path for (path, _), kind in self.kinds.items() if len(kind.bodies) >= CONFIRMATIONS}
        told = dict.fromkeys(confirmed, "yes") | {path: f"no, {why}" for path, why in self.rejected_because.items()}
        return "; ".join(f"{path}: {what}" for path, what in sorted(told.items())) or "not tried yet"

    def seen(self, path: str, name: str) -> _Kind | None:
        """A body of this kind goes to the replica: what is known of the kind, None if this is its first."""
        found = self.kinds.pop((path, name), None)
        self.kinds[path, name] = found or _Kind()
        if len(self.kinds) > MOST_KINDS:
            del self.kinds[next(iter(self.kinds))]
        return found


class TokenIdForwarding:
    """The part of the dispatcher that decides between a prompt's text and its ids."""

    def __init__(self, metrics: Metrics, wanted: bool, backends: Mapping[str, Backend], made_by: Callable[[str], int]):
        """`made_by`: the number of the present way of making a replica's ids. What was confirmed of another is void."""
        self.metrics, self.wanted, self._backends, self._made_by = metrics, wanted, backends, made_by
        self._differed: dict[str, tuple[Forwarding, str]] = {}  # by replica: the process that made other ids, and how

    def body(self, life: Life) -> bytes:
        """What is sent to `life.backend`; a retry is always as received. Ids that nobody will ask for again are dropped:
        they are as large as the body, and the answer may take minutes."""
        prompt, backend, body = life.prompt, life.backend, life.request.body
        life.sent_ids = False
        if prompt is None:
            return body
        if prompt.also is not None:
            prompt.also.token_ids = b""
        if not prompt.kind or not self.wanted:
            prompt.token_ids = b""
            return body
        kind = None
        if not self._off(backend) and prompt.path not in (known := self._known(backend)).rejected_because:
            kind = known.seen(prompt.path, prompt.kind)
        if kind is not None and self._may_forward(life, kind) and (spliced := with_ids(body, prompt, backend.replica.dialect.chat_token_ids)) is not None:
            kind.left -= 1
            life.sent_ids, body = True, spliced
        if life.sent_ids or kind is None or not self._wants_check(backend, known, kind, prompt):
            prompt.token_ids = b""
        self.metrics.long_prompts.inc(backend.id, "ids" if life.sent_ids else "text")
        return body

    def settled(self, life: Life, usage: Usage) -> None:
        """A complete answer with status 200: does it agree, and is it one to check?"""
        prompt, backend = life.prompt, life.backend
        if not self.wanted or prompt.path not in PATHS:
            return
        if life.ids_refused is backend:
            self._reject(backend, prompt.path, "it refused a request with ids that it answered without")
        elif usage.prompt is not None and usage.prompt != prompt.tokens and prompt.mode == "exact" and not prompt.several and not self._outdated(backend, prompt):
            self._differ(backend, prompt.path, f"its usage says {usage.prompt} tokens of a prompt that has {prompt.tokens} here")
        if prompt.kind and prompt.token_ids:
            known = self._known(backend)
            kind = known.kinds.get((prompt.path, prompt.kind))
            if kind is not None and self._wants_check(backend, known, kind, prompt):
                given = life.request.header(b"authorization")
                headers = {**backend.replica.headers, **({"authorization": given} if given else {})}
                known.checking = asyncio.create_task(self._check(backend, prompt, life.request.body, headers))

    def _may_forward(self, life: Life, kind: _Kind) -> bool:
        prompt = life.prompt
        if kind.left <= 0 or life.tried or life.ids_refused is not None or not prompt.token_ids or self._outdated(life.backend, prompt):
            return False
        # An engine that makes the ids refuses what is too long for its context; one that gets them would cut the answer.
        limit = life.backend.replica.max_model_len
        return limit is not None and prompt.tokens + max(1, prompt.max_tokens or 1) <= limit

    def _wants_check(self, backend: Backend, known: Forwarding, kind: _Kind, prompt: Prompt) -> bool:
        """Whether this body, sent as received, is to be checked once it is answered."""
        if known.checking is not None or prompt.path in known.rejected_because or monotonic() < kind.pause or self._off(backend) or self._outdated(backend, prompt):
            return False
        if len(kind.bodies) >= CONFIRMATIONS:
            return not kind.left
        return xxh3_64_intdigest(prompt.token_ids) not in kind.bodies

    async def _check(self, backend: Backend, prompt: Prompt, body: bytes, headers: dict[str, str]) -> None:
        known, path, ids = self._known(backend), prompt.path, prompt.token_ids
        try:
            replica, timeout = backend.replica, aiohttp.ClientTimeout(ANSWER_SECONDS)
            async with session_to(replica.address, replica.tls, base_url=replica.url, headers=headers, timeout=timeout) as session:
                why = await check_ids(poster(session), path, body, ids)
                if not why and path not in known.accepts:
                    why = await takes_ids(poster(session), path, prompt.model, ids[:4], replica.dialect.chat_token_ids)
        except Unanswered as error:
            if (kind := known.kinds.get((path, prompt.kind))) is not None:
                kind.pause = monotonic() + PAUSE_SECONDS
            self.metrics.token_id_checks.inc(backend.id, "unanswered")
            log.info("replica %s: whether it makes the same token ids is not known yet: %s", backend.id, error)
            return
        except Different as error:
            if not backend.gone and known is backend.forwarding and not self._outdated(backend, prompt):
                self.metrics.token_id_checks.inc(backend.id, "different")
                self._differ(backend, path, f"{error} ({prompt.kind}): another tokenizer or chat template, or a mistake of the gateway's")
            return
        finally:
            known.checking = None
        if backend.gone or known is not backend.forwarding or self._outdated(backend, prompt) or self._off(backend) or path in known.rejected_because:
            return
        if why:
            self._reject(backend, path, why)
            return
        known.accepts.add(path)
        self.metrics.token_id_checks.inc(backend.id, "same")
        self._confirmed(backend, known, prompt)

    def _confirmed(self, backend: Backend, known: Forwarding, prompt: Prompt) -> None:
        kind = known.kinds.get((prompt.path, prompt.kind))
        if kind is None:  # forgotten meanwhile
            return
        if len(kind.bodies) < CONFIRMATIONS:
            kind.bodies.add(xxh3_64_intdigest(prompt.token_ids))
            if len(kind.bodies) < CONFIRMATIONS:
                return
            log.info("replica %s gets token ids at %s from now on: %s", backend.id, prompt.path, prompt.kind)
            backend.replica.takes_ids = known.says()
        kind.left = CHECK_EVERY - 1

    def _outdated(self, backend: Backend, prompt: Prompt) -> bool:
        """Whether its ids were made in a way that has been left since."""
        return prompt.made_by != self._made_by(backend.id)

    def _known(self, backend: Backend) -> Forwarding:
        """What is known of the process that is behind the replica now, and of ids as they are made now."""
        known, made_by = backend.forwarding, self._made_by(backend.id)
        if known.incarnation != backend.incarnation:
            known = _forwarding(backend)
        if known.made_by != made_by:
            known.made_by = made_by
            if known.kinds:
                known.kinds.clear()
                if not self._differed:
                    backend.replica.takes_ids = known.says()
        return known

    def look(self) -> None:
        """Some replica has come, gone or become another process."""
        gone = [id for id, (known, _) in self._differed.items() if (one := self._backends.get(id)) is None or _forwarding(one) is not known]
        for id in gone:
            del self._differed[id]
        if gone and not self._differed:
            self._begin_anew()

    def _off(self, backend: Backend) -> bool:
        """Whether a replica whose prompts are made like this one's has, in its present process, made other ids than the gateway."""
        return bool(self._differed) and any(
            (one := self._backends.get(id)) is not None and one.candidate.space == backend.candidate.space for id in self._differed
        )

    def _begin_anew(self) -> None:
        log.info("token ids may be forwarded again: the replicas that made others are gone")
        for backend in self._backends.values():
            backend.replica.takes_ids = _forwarding(backend).says()

    def _differ(self, backend: Backend, path: str, why: str) -> None:
        """End it for all replicas whose prompts are made in the same way."""
        if backend.id in self._differed:
            return
        known = self._known(backend)
        self._differed[backend.id] = known, why
        self.metrics.ids_refused.inc(backend.id)
        log.error("no replica of this model gets token ids from now on, all prompts go as text: replica %s, %s: %s. Compare --model and --chat-template with the "
                  "engine's (`hitherto doctor` does); it begins again when another process is behind that replica", backend.id, path, why)  # fmt: skip
        for one in self._backends.values():
            if one.candidate.space != backend.candidate.space:
                continue
            _forwarding(one).kinds.clear()
            one.replica.takes_ids = f"{path}: no, {why if one is backend else f'replica {backend.id} makes other ids'}"

    def _reject(self, backend: Backend, path: str, why: str) -> None:
        """End it for this replica's process and this path."""
        known = _forwarding(backend)
        if path not in known.rejected_because:
            for one in [one for one in known.kinds if one[0] == path]:
                del known.kinds[one]
            known.rejected_because[path] = why
            backend.replica.takes_ids = known.says()
            self.metrics.ids_refused.inc(backend.id)
            log.warning("replica %s gets prompts at %s as text from now on: %s", backend.id, path, why)


def _forwarding(backend: Backend) -> Forwarding:
    """What is known of the process that is behind the replica now."""
    known = backend.forwarding
    if known.incarnation != backend.incarnation:
        known = backend.forwarding = Forwarding(backend.incarnation)
        backend.replica.takes_ids = known.says()
    return known


def poster(session: aiohttp.ClientSession) -> Post:
    """POST to the session's base URL."""

    async def post(path: str, body: bytes) -> tuple[int, bytes]:
        try:
            async with session.post(path, data=body, headers={"content-type": "application/json"}) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unanswered(str(error) or type(error).__name__) from None

    return post
