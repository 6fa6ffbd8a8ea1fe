"""The token ids that an engine makes of fixed texts and fixed chats, to be compared with the gateway's.

An equal tokenizer says nothing about how an engine fills a chat template: with which defaults, which fields of a
message, and what it makes of tools. Flags change all of that, and cannot be seen from outside. So each engine is asked
for the ids of these chats when it is adopted, by its own /tokenize. Chats that /tokenize does not take, or would write
differently from a real chat, are sent as real chats with an answer of one token, which reports the prompt's ids or
their number. Where a template prints the date, one of the chats shows which day the engine prints.
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
# Given by both names: vLLM's /tokenize reads only the newer one, though its chats take either; SGLang only the older.
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
MOST_ANSWER = 1 << 18  # bytes of an answer; one fixed text has some thousand ids at most
AT_ONCE = 4  # questions to one engine at the same time, since it may be busy with prompts
NOT_NOW = (408, 429, 502, 503, 504)  # statuses of an engine that is busy, or not up yet
OTHER_TOKENS = "of a chat it makes other tokens"
NOTHING_SHOWN = "nothing shows how it fills the chat template"


class Made(NamedTuple):
    """A chat with the gateway's token ids of it.

    `by_chat`: whether to send it as a real chat, as the engine's /tokenize would make other ids. `path`: its API path.
    """

    body: dict[str, Any]
    ids: list[int]
    by_chat: bool
    path: str = CHAT


class NotAsked(Exception):
    """The engine did not process the question. `final`: whether asking again would not help."""

    def __init__(self, why: str, final: bool = False):
        super().__init__(why)
        self.final = final


class EngineTokens:
    """The questions to one engine about its tokens. All methods raise NotAsked.

    `url`: the engine's URL; `model`: a name by which it serves its model, or None.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str | None):
        self._session, self._url = session, url
        self._model = {"model": model} if model else {}
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def of_texts(self, texts: list[str]) -> list[Answer]:
        """Return the ids that /tokenize gives for each text, without and with special tokens."""
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
        """Return the engine's status, and its ids of a chat or their number; None if it reports neither."""
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
    """Open a session with a replica's engine for questions about its tokens."""
    async with session_to(replica.address, replica.tls, headers=replica.credentials) as session:
        yield EngineTokens(session, replica.url, next(iter(base_names(replica.models)), None))


async def chats_differ(engine: EngineTokens, chats: Iterable[Made]) -> str:
    """Return why the engine's tokens of these chats are not the gateway's, or cannot be shown to be; "" if they are.

    Chats that the gateway or the engine cannot render are left out. Raises NotAsked if the engine could not be asked.
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
    """Return the days that the engine may have printed in a chat, of the days that it is now anywhere on earth.

    It is one day where the engine's ids show it, and none where its ids match the gateway's for no day. Raises
    NotAsked.
    """
    days = days_in(ALL_ZONES, pipeline.clock.now())
    for body in CHATS:
        made = {day: pipeline.made(CHAT, json.dumps(body).encode(), day) for day in days}
        if len({tuple(ids) for ids in made.values()}) > 1:
            _, theirs = await engine.of_chat(body, not pipeline.tokenizes_chats)
            return [day for day, ids in made.items() if theirs is None or theirs in (ids, len(ids))]
    return days


def made_here(pipeline: Pipeline, day: date | None = None) -> Iterator[Made]:
    """Yield the fixed chats that the gateway can tokenize, with their ids. `day`: the day that the engine prints."""
    for body in CHATS:
        if ids := pipeline.made(CHAT, json.dumps(body).encode(), day):
            yield Made(body, ids, not pipeline.tokenizes_chats)


def efforts_here(pipeline: Pipeline, day: date | None = None) -> Iterator[Made]:
    """Yield the chats whose reasoning effort changes the gateway's ids, and then the one without thinking.

    An engine may have a map of efforts in its flags, which its /tokenize does not use, and a flag for the effort of
    requests to /v1/messages that disable thinking. `day`: the day that the engine prints.
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
