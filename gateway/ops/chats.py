"""The gateway's chats against an engine's: fixed ones, of which both make token ids.

A tokenizer that is the same shows nothing of how an engine fills a chat template: with which defaults, which of a
message's fields, and what it makes of tools. So an engine of a kind that is not known to do it as the gateway does is
asked for the ids of these chats when it is adopted, by its own /tokenize. One whose /tokenize takes no messages is
asked for one token of each, and for how many tokens it counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import aiohttp

from ..errors import ApiError
from ..prompt.pipeline import Pipeline

Made = tuple[dict[str, Any], list[int]]  # a chat, and its ids
CHAT = "/v1/chat/completions"
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
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [_ASKED]},
    {"messages": [{"role": "system", "content": "Be brief."}, _ASKED]},
    {"messages": [_ASKED, {"role": "assistant", "content": " Down.\n"}, {"role": "user", "content": "  Why? "}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]}]},
    {"messages": [_ASKED], "tools": [_TOOL]},
    {
        "messages": [
            _ASKED,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "Sunny."},
        ],
        "tools": [_TOOL],
    },
)


NOT_NOW = (408, 429, 502, 503, 504)  # of an engine that is busy, or not up yet


class NotAsked(Exception):
    """The engine did not look at the chat: the answer says nothing of how it fills templates."""


async def chats_differ(session: aiohttp.ClientSession, url: str, model: str | None, chats: Iterable[Made]) -> str:
    """Why the engine's chats are not the gateway's, or cannot be shown to be; "" if they are. Chats that one of the two
    cannot render count for nothing. Raises NotAsked where the engine could not be asked, aiohttp's errors and
    TimeoutError."""
    compared, failed = 0, 0
    for body, ids in chats:
        asked = {**({"model": model} if model else {}), **body}
        status, told = await _post(session, f"{url}/tokenize", asked)
        theirs: object = told.get("tokens")
        if status == 200 and isinstance(theirs, list):
            same = theirs == ids
        else:
            status, told = await _post(session, url + CHAT, {**asked, "max_tokens": 1})
            usage = told.get("usage")
            theirs = usage.get("prompt_tokens") if status == 200 and isinstance(usage, dict) else None
            if theirs is None:
                failed = status if status >= 500 else failed
                continue
            same = theirs == len(ids)
        compared += 1
        if not same:
            there = len(theirs) if isinstance(theirs, list) else theirs
            return f"of a chat it makes other tokens ({there}, here {len(ids)}): {json.dumps(body)[:120]}"
    if failed and not compared:
        raise NotAsked(f"it answers {failed}")
    return "" if compared else "nothing shows how it fills the chat template"


def made_here(pipeline: Pipeline) -> Iterator[Made]:
    """Those that the gateway makes ids of, while the pipeline is exact."""
    for body in CHATS:
        try:
            prompt = pipeline.prepare(CHAT, json.dumps(body).encode())
        except ApiError:
            continue
        if prompt.mode == "exact":
            yield body, memoryview(prompt.token_ids).cast("I").tolist()


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with session.post(url, json=body) as response:
        if response.status in (401, 403):
            raise NotAsked(
                "it wants an API key, and not the one that the gateway has: give it with --engine-api-key @FILE"
            )
        if response.status in NOT_NOW:
            raise NotAsked(f"it answers {response.status}")
        try:
            told = await response.json(content_type=None)
        except ValueError:
            told = None
        return response.status, told if isinstance(told, dict) else {}
