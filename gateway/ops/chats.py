"""A comparison of the gateway's chats with an engine's: fixed chats of which both make token ids.

An equal tokenizer says nothing about how an engine fills a chat template: with which defaults, which fields of a
message, and what it makes of tools. Flags change all of that, and cannot be seen from outside. So each engine is asked
for the ids of these chats when it is adopted, by its own /tokenize. Chats that /tokenize does not take, or would write
differently from a real chat, are sent as real chats with an answer of one token, which reports the prompt's ids or
their number. Where a template prints the date, one of the chats shows which day the engine prints.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from datetime import date
from typing import Any, NamedTuple

import aiohttp
import orjson

from replicas.ask import body_of

from ..prompt.pipeline import Pipeline
from ..prompt.render.clock import ALL_ZONES, days_in

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

MOST_ANSWER = 1 << 18  # bytes
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
    """The engine did not process the chat, so the answer says nothing about how it fills templates."""


async def chats_differ(session: aiohttp.ClientSession, url: str, model: str | None, chats: Iterable[Made]) -> str:
    """Return why the engine's tokens of these chats are not the gateway's, or cannot be shown to be; "" if they are.

    Chats that the gateway or the engine cannot render are left out. Raises NotAsked if the engine could not be asked,
    aiohttp's errors and TimeoutError.
    """
    compared, failed = 0, 0
    for body, ids, by_chat, path in chats:
        status, theirs = await _asked(session, url, model, body, by_chat, path)
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


async def days_printed(
    session: aiohttp.ClientSession, url: str, model: str | None, pipeline: Pipeline
) -> Collection[date]:
    """Return the days that the engine may have printed in a chat, of the days that it is now anywhere on earth.

    It is one day where the engine's ids show it, and none where its ids match the gateway's for no day. Raises what
    `chats_differ` raises.
    """
    days = days_in(ALL_ZONES, pipeline.clock.now())
    for body in CHATS:
        made = {day: pipeline.made(CHAT, json.dumps(body).encode(), day) for day in days}
        if len({tuple(ids) for ids in made.values()}) > 1:
            _, theirs = await _asked(session, url, model, body, not pipeline.tokenizes_chats)
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


async def _asked(
    session: aiohttp.ClientSession, url: str, model: str | None, body: dict[str, Any], by_chat: bool, path: str = CHAT
) -> tuple[int, list[int] | int | None]:
    """Return the engine's status, and its ids of a chat or their number; None if it reports neither."""
    asked = {**({"model": model} if model else {}), **body}
    if path == MESSAGES:
        status, told = await _post(session, f"{url}{MESSAGES}/count_tokens", asked)
        return status, told.get("input_tokens") if status == 200 else None
    if not by_chat:
        status, told = await _post(session, f"{url}/tokenize", asked)
        if status == 200 and isinstance(ids := told.get("tokens"), list):
            return status, ids
    status, told = await _post(session, url + CHAT, {**asked, "max_tokens": 1, "return_token_ids": True})
    if status != 200:
        return status, None
    if isinstance(ids := told.get("prompt_token_ids"), list):
        return status, ids
    usage = told.get("usage")
    return status, usage.get("prompt_tokens") if isinstance(usage, dict) else None


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with session.post(url, json=body, allow_redirects=False) as response:
        if response.status in (401, 403):
            raise NotAsked(
                "it wants an API key, and not the one that the gateway has: give it with --engine-api-key @FILE"
            )
        if response.status in NOT_NOW:
            raise NotAsked(f"it answers {response.status}")
        try:
            told = orjson.loads(await body_of(response, MOST_ANSWER))
        except ValueError:
            told = None
        return response.status, told if isinstance(told, dict) else {}
