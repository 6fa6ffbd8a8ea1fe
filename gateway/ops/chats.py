"""Asks an engine for its token ids of fixed texts and fixed chats, to compare them with the gateway's.

Even with the same tokenizer, an engine may fill a chat template differently: with other defaults, other fields of a
message, or another way of writing tools. Its flags decide that, and cannot be seen from outside. Each engine is
therefore asked for the ids of these chats, through its own /tokenize, when it becomes a replica.

An engine's /tokenize may refuse a chat, or render it differently from a request to complete it. Such chats are sent as
real requests with an answer of one token, which reports the prompt's ids or their number. If a template prints the
date, one of the chats shows which day the engine prints.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from datetime import date
from typing import Any, NamedTuple

import aiohttp
import orjson

from replicas import Replica
from replicas.access import session_to
from replicas.ask import body_of
from replicas.served import base_names

from ..prompt.pipeline import Pipeline
from ..prompt.render.clock import ALL_ZONES, days_in
from ..prompt.tokens.agreement import Answer

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
_ASKED = {"role": "user", "content": "Which way did the white rabbit go?"}
_CALLED = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
# The reasoning is given by both names. vLLM's /tokenize reads only the newer name, `reasoning`, though vLLM's chats
# take either; SGLang reads only the older one.
_THOUGHT = {"reasoning": "I look outside.", "reasoning_content": "I look outside."}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "Sunny."}
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [_ASKED]},
    {"messages": [{"role": "system", "content": "Be brief."}, _ASKED]},
    {"messages": [_ASKED, {"role": "assistant", "content": " Down.\n"}, {"role": "user", "content": "  Why? "}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]}]},
    {"messages": [_ASKED], "tools": [_TOOL]},
    {"messages": [_ASKED, _CALLED, _RESULT], "tools": [_TOOL]},
    {"messages": [_ASKED, {**_CALLED, **_THOUGHT}, _RESULT], "tools": [_TOOL]},
    {"messages": [_ASKED, _CALLED, _RESULT]},
)
EFFORTS = tuple(
    {"messages": [_ASKED], "reasoning_effort": effort}
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max")
)
WITHOUT_THINKING = {"messages": [_ASKED], "thinking": {"type": "disabled"}}  # of /v1/messages

ANSWER_SECONDS = 10.0
MOST_ANSWER = 1 << 18  # the largest answer in bytes; one fixed text has some thousand ids at most
AT_ONCE = 4  # questions to one engine at the same time, since it may be busy with prompts
NOT_NOW = (408, 429, 502, 503, 504)  # statuses of an engine that is busy, or not up yet
OTHER_TOKENS = "of a chat it makes other tokens"
NOTHING_SHOWN = "nothing shows how it fills the chat template"


class Made(NamedTuple):
    """A chat with the gateway's token ids of it.

    `by_chat`: whether to send it to the engine as a real chat, because the engine's /tokenize would make other ids than
    a real chat gets. `path`: the API path of the real chat.
    """

    body: dict[str, Any]
    ids: list[int]
    by_chat: bool
    path: str = CHAT


class NotAsked(Exception):
    """Raised if an engine did not report its tokens. `final`: whether another attempt would fail in the same way."""

    def __init__(self, why: str, final: bool = False):
        super().__init__(why)
        self.final = final


class EngineTokens:
    """Requests to one engine for its token ids. All methods raise NotAsked if the engine does not report them.

    `url`: the engine's URL. `model`: a name by which it serves its model, or None.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str | None):
        self._session, self._url = session, url
        self._model = {"model": model} if model else {}
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def of_texts(self, texts: list[str]) -> list[Answer]:
        """Return the answers of the engine's /tokenize: two for each text, without and with special tokens."""
        return await asyncio.gather(*(self._of_text(text, special) for text in texts for special in (False, True)))

    async def _of_text(self, text: str, special: bool) -> Answer:
        status, told = await self._post("/tokenize", {"prompt": text, "add_special_tokens": special})
        if status != 200:
            raise NotAsked(f"/tokenize answers {status}", final=status < 500)
        ids = told.get("tokens")
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise NotAsked("/tokenize tells no token ids", final=bool(told))  # else something before the engine answers
        return Answer(text, special, ids)

    async def of_chat(
        self, body: dict[str, Any], by_chat: bool, path: str = CHAT
    ) -> tuple[int, list[int] | int | None]:
        """Return the HTTP status of the engine's answer, and its token ids of a chat, or only their number.

        The second value is None if the engine reports neither. `by_chat`: whether to send a real chat at once, without
        trying /tokenize. `path`: the chat's API path; on /v1/messages, the engine is asked for the number only.
        """
        if path == MESSAGES:
            status, told = await self._post(f"{MESSAGES}/count_tokens", body)
            return status, told.get("input_tokens") if status == 200 else None
        if not by_chat:
            status, told = await self._post("/tokenize", body)
            if status == 200 and isinstance(ids := told.get("tokens"), list):
                return status, ids
        status, told = await self._post(CHAT, {**body, "max_tokens": 1, "return_token_ids": True})
        if status != 200:
            return status, None
        if isinstance(ids := told.get("prompt_token_ids"), list):
            return status, ids
        usage = told.get("usage")
        return status, usage.get("prompt_tokens") if isinstance(usage, dict) else None

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked, timeout = {**self._model, **body}, aiohttp.ClientTimeout(ANSWER_SECONDS)
        try:
            async with (
                self._gate,
                self._session.post(self._url + path, json=asked, timeout=timeout, allow_redirects=False) as response,
            ):
                if response.status in (401, 403):
                    why = (
                        "it wants an API key, and not the one that the gateway has: give it with --engine-api-key @FILE"
                    )
                    raise NotAsked(why, final=True)
                if response.status in NOT_NOW:
                    raise NotAsked(f"it answers {response.status}")
                try:
                    told = orjson.loads(await body_of(response, MOST_ANSWER))
                except ValueError:
                    told = None
                return response.status, told if isinstance(told, dict) else {}
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NotAsked(f"{path} does not answer: {str(error) or type(error).__name__}") from None


@asynccontextmanager
async def tokens_of(replica: Replica) -> AsyncIterator[EngineTokens]:
    """Open an HTTP session with a replica's engine, to ask it for its token ids."""
    async with session_to(replica.address, replica.tls, headers=replica.credentials) as session:
        yield EngineTokens(session, replica.url, next(iter(base_names(replica.models)), None))


async def chats_differ(engine: EngineTokens, chats: Iterable[Made]) -> str:
    """Compare the engine's token ids of these chats with the gateway's; return the difference, or "" if there is none.

    Chats that the engine cannot render are left out. If it renders none, NOTHING_SHOWN is returned, a text that says
    so. Raises NotAsked if the engine could not be asked.
    """
    compared, failed = 0, 0
    for body, ids, by_chat, path in chats:
        status, theirs = await engine.of_chat(body, by_chat, path)
        if theirs is None:
            failed = status if status >= 500 else failed
            continue
        compared += 1
        if theirs not in (ids, len(ids)):
            there = len(theirs) if isinstance(theirs, list) else theirs
            return f"{OTHER_TOKENS} ({there}, here {len(ids)}): {json.dumps(body)[:120]}"
    if failed and not compared:
        raise NotAsked(f"it answers {failed}")
    return "" if compared else NOTHING_SHOWN


async def days_printed(engine: EngineTokens, pipeline: Pipeline) -> Collection[date]:
    """Return the dates that the engine may print in chats now. Raises NotAsked.

    The candidates are the dates that it is now in some time zone. One chat is tokenized with each of them, and those
    that give the engine's token ids are returned: usually one, and none if the engine makes other ids. All are returned
    if the engine does not show its ids.
    """
    days = days_in(ALL_ZONES, pipeline.clock.now())
    for body in CHATS:
        made = {day: pipeline.made(CHAT, json.dumps(body).encode(), day) for day in days}
        if len({tuple(ids) for ids in made.values()}) > 1:
            _, theirs = await engine.of_chat(body, not pipeline.tokenizes_chats)
            return [day for day, ids in made.items() if theirs is None or theirs in (ids, len(ids))]
    return days


def made_here(pipeline: Pipeline, day: date | None = None) -> Iterator[Made]:
    """Yield the fixed chats that the gateway can tokenize, with their ids.

    `day`: the date that the engine prints in chats; None: today.
    """
    for body in CHATS:
        if ids := pipeline.made(CHAT, json.dumps(body).encode(), day):
            yield Made(body, ids, not pipeline.tokenizes_chats)


def efforts_here(pipeline: Pipeline, day: date | None = None) -> Iterator[Made]:
    """Yield the chats whose reasoning effort changes the gateway's token ids, and then one with thinking disabled.

    An engine may have flags that replace one effort by another. Its /tokenize does not apply them, so these are real
    chats. The last chat is for /v1/messages, where another flag sets the effort of requests that disable thinking.
    `day`: the date that the engine prints in chats; None: today.
    """
    plain = pipeline.made(CHAT, json.dumps(CHATS[0]).encode(), day)
    matters = False
    for path, body in (*((CHAT, effort) for effort in EFFORTS), (MESSAGES, WITHOUT_THINKING)):
        ids = pipeline.made(path, json.dumps(body).encode(), day) if not pipeline.unfollowed(body) else []
        matters = matters or ids not in ([], plain)
        if ids and (ids != plain or (matters and path == MESSAGES)):
            yield Made(body, ids, True, path)


def written(day: date) -> str:
    return f"{day:%A} {day.day} {day:%B}"
