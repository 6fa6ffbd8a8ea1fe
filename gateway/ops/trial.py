"""A trial of `hitherto doctor`: a short new prompt, sent to one replica, and checks of what must follow from it.

The engine must count the same tokens as the gateway, publish the blocks it stored as KV events that the gateway can
place, and find them again when the prompt is sent once more.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from types import MappingProxyType
from typing import Any, Literal

import aiohttp

from cachemap import CacheMap, EventIntake
from cachemap.events import records
from cachemap.events.records import UNTOLD, Blocks
from gateway.ops.chats import (
    CHAT,
    NOTHING_SHOWN,
    NotAsked,
    chats_differ,
    days_printed,
    efforts_here,
    made_here,
    written,
)
from gateway.ops.comparison import Unanswered, engine_answers
from gateway.prompt.pipeline import Pipeline
from gateway.settings import Settings
from replicas.deadline import within
from replicas.problems import NO_CACHED_TOKENS, NO_REPLAY, TIERS_UNTOLD, Problem
from replicas.replica import EventSource, Replica
from replicas.served import base_names

# Endpoints that compute a prompt, and the field that holds it: for models that generate, embed or score.
ASKED_AT = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/classify": "input", "/pooling": "input"}
UNTOLD_TOKENS = 1024  # tokens looked up in slower tiers without any event of theirs: pieces have at most 256
WIDER = 8  # most GPUs that share a block: vLLM before 0.32 reports one GPU's share, and events whole blocks
EVENT_SECONDS = 5.0  # vLLM publishes with the step that stores the blocks: tens of milliseconds
JOIN_SECONDS = 1.0  # a publisher without replay sends nothing before its first event
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
ANSWER_SECONDS = 60.0  # a loaded engine may queue the trial
WORDS = "river lantern copper meadow orbit velvet anchor thistle marble ember willow saddle quartz harbor nimbus tinder".split()


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report, and what to do about it."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    remedy: str = ""


def turns(count: int) -> list[dict[str, str]]:
    """Return a conversation of `count` questions with answers to all but the last."""
    messages = [{"role": "system", "content": "You are a careful assistant. " + " ".join(WORDS)}]
    for number in range(count):
        messages.append({"role": "user", "content": f"Question {number}: what is {number} plus two?"})
        messages.append({"role": "assistant", "content": f"That is {number + 2}."})
    return messages[:-1]


@dataclass
class Trial:
    """The trial of one replica. `pipeline`: makes the gateway's tokens of its model, or None without its files."""

    settings: Settings
    session: aiohttp.ClientSession
    pipeline: Pipeline | None
    served: str
    replica: Replica
    problems: dict[str, Problem]  # problems that its engine reported of itself
    told: Blocks = UNTOLD  # its block format, as its events show it

    @property
    def id(self) -> str:
        return self.replica.id

    @property
    def block_size(self) -> int:
        return self.settings.block_size or self.replica.stored_size or self.replica.block_size or 16

    @property
    def may_be_wider(self) -> bool:
        """Whether blocks may have several times the reported tokens, and the context has room for some of them."""
        replica = self.replica
        told = replica.scrape.attention_block_size if replica.scrape is not None else None
        return not told and (replica.max_model_len or 0) > 8 * WIDER * self.block_size

    @property
    def model(self) -> str:
        own = base_names(self.replica.models)
        return self.served if self.served in own or not own else own[0]

    async def post(self, path: str, body: dict[str, Any], more: Mapping[str, str] = NO_HEADERS) -> dict[str, Any]:
        """Return the JSON reply. `more`: headers besides the replica's own. Raises Refused and Locked."""
        try:
            url, deadline = self.replica.url + path, aiohttp.ClientTimeout(ANSWER_SECONDS)
            async with self.session.post(
                url, json=body, headers={**self.replica.headers, **more}, timeout=deadline, allow_redirects=False
            ) as response:
                reply = await response.json(content_type=None)
                if response.status in (401, 403):
                    raise Locked
                if response.status == 404:
                    raise NotServed(f"{path} answers 404: {json.dumps(reply)[:200]}")
                if response.status != 200 or not isinstance(reply, dict):
                    raise Refused(f"{path} answers {response.status}: {json.dumps(reply)[:200]}")
                return reply
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Refused(f"{path} does not answer: {str(error) or type(error).__name__}") from None

    async def ask(self, text: str) -> tuple[str, dict[str, Any]]:
        """Have the engine compute this prompt, and return the endpoint that took it, and the reply."""
        first = None
        for path, field in ASKED_AT.items():
            body = {"model": self.model, field: text}
            if path == "/v1/completions":
                body |= {"max_tokens": 1, "temperature": 0}
            try:
                return path, await self.post(path, body)
            except NotServed as error:
                first = first or error
        assert first is not None
        raise first

    def learn(self, told: Blocks) -> bool:
        """Apply the block format that events showed, and return whether a gateway would learn something new from it."""
        known, self.told = (self.block_size, self.replica.looks_ahead), told
        return self.replica.store_as(told.size, told.ahead, told.parts) and known != (self.block_size, told.ahead)

    def hashes(self, text: str) -> Sequence[int]:
        """Return the hashes of that prompt's blocks, whichever endpoint took it."""
        assert self.pipeline is not None
        self.pipeline.block_size, self.pipeline.looks_ahead = self.block_size, self.replica.looks_ahead
        return self.pipeline.prepare("/v1/completions", json.dumps({"prompt": text}).encode()).hashes


class Refused(Exception):
    """A replica did not answer a trial usefully."""


class NotServed(Refused):
    """The replica has no such endpoint, or no such model."""


class Locked(Exception):
    """A replica requires an API key, which the doctor does not have."""


async def trials(trial: Trial) -> AsyncIterator[Finding]:
    """Yield the findings of one replica's trial."""
    try:
        async for finding in _trials(trial):
            yield finding
    except Locked:
        yield Finding(
            "warn",
            f"trial {trial.id}",
            "it wants an API key, so its tokens, events and cache could not be tried",
            trial.replica.dialect.remedies.models,
        )


async def _trials(trial: Trial) -> AsyncIterator[Finding]:
    if trial.pipeline:
        if trial.pipeline.tokenizer is not None:
            yield await _same_tokenizer(trial)
        yield await _same_tokens(trial)
    if "caching" in trial.problems:
        return  # reported already: without caching there are no events and no hits
    source = trial.replica.events
    if source is None:
        problem = trial.problems.get("events") or trial.problems["ranks"]
        yield Finding("warn", f"events {trial.id}", problem.what, problem.remedy)
    size = trial.block_size
    text = new_prompt(size)
    try:
        if source is not None:
            async for finding in _blocks_arrive(trial, source, text):
                yield finding
        if source is None or trial.told.size > size:  # too short for a block of the size that events show
            text = new_prompt(max(size, trial.told.size))
            await trial.ask(text)
        yield _cached_tokens(trial, *await trial.ask(text))
    except Refused as error:
        yield Finding("fail", f"trial {trial.id}", str(error), "the engine's own log says more")


def new_prompt(block_size: int) -> str:
    """Return a new random prompt of three full blocks and a bit, as each word has at least one token."""
    return secrets.token_hex(8) + " " + " ".join(secrets.choice(WORDS) for _ in range(3 * block_size + 8))


async def _same_tokenizer(trial: Trial) -> Finding:
    """Compare the engine's ids of fixed texts with the gateway's, then adopt its way of reading the files."""
    subject, pipeline = f"tokenizer {trial.id}", trial.pipeline
    try:
        answers = await engine_answers(trial.session, trial.replica.url, trial.model, pipeline.fixed_texts())
    except Unanswered as error:
        doubt = pipeline.inexact()
        return Finding("warn", subject, f"cannot be compared with the engine's: {error}" + (f"; {doubt}: prompts are matched as text" if doubt else ""),
                       "the engine should serve /tokenize to the gateway")  # fmt: skip
    verdict = pipeline.judge(answers)
    if not verdict.differs:
        pipeline.adopt(verdict, True)
    else:
        return Finding("fail", subject, f"is another than the gateway's, so prompts are matched as text: {verdict.differs}",
                       "the engine has another tokenizer: give --model the folder or name that it was started with")  # fmt: skip
    return Finding("ok", subject, f"makes the same tokens of {len(answers)} texts: {verdict.how}")


async def _engine_tokens(trial: Trial, messages: list[dict[str, str]]) -> Any:
    """Return the engine's token ids of a conversation.

    They come from /tokenize. Where a template is not used for chats, /tokenize may show what the template would give,
    so there a one-token answer reports the ids of its prompt.
    """
    asked: dict[str, Any] = {"model": trial.model, "messages": messages}
    if trial.pipeline.tokenizes_chats:
        return (await trial.post("/tokenize", asked)).get("tokens")
    return (await trial.post("/v1/chat/completions", asked | {"max_tokens": 1, "return_token_ids": True})).get(
        "prompt_token_ids"
    )


async def _day_printed(trial: Trial) -> date | None:
    """Return the day that the engine prints in a chat, or None if it is not known. Raises NotAsked."""
    if not trial.pipeline.prints_date:
        return None
    try:
        printed = await days_printed(trial.session, trial.replica.url, trial.model, trial.pipeline)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NotAsked(str(error) or type(error).__name__) from None
    return min(printed) if len(printed) == 1 else None


async def _differing_chats(trial: Trial, day: date | None) -> str:
    """Return how the fixed chats, by which engines are compared when adopted, differ; "" if not. Raises NotAsked."""
    url, model = trial.replica.url, trial.model
    for made in filter(None, ([*made_here(trial.pipeline, day)], [*efforts_here(trial.pipeline, day)])):
        try:
            differs = await chats_differ(trial.session, url, model, made)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NotAsked(str(error) or type(error).__name__) from None
        if differs and (differs != NOTHING_SHOWN or trial.pipeline.must_be_shown):
            return differs
    return ""


async def _same_tokens(trial: Trial) -> Finding:
    """Compare the engine's tokens of a conversation with the gateway's."""
    subject, messages = f"tokens {trial.id}", turns(2)
    try:
        day = await _day_printed(trial)
        ours = trial.pipeline.made(CHAT, json.dumps({"messages": messages}).encode(), day)
        theirs = await _engine_tokens(trial, messages)
        differs = await _differing_chats(trial, day) if theirs == ours else ""
    except (Refused, NotAsked) as error:
        return Finding(
            "warn", subject, f"cannot be compared with the engine's: {error}", "the engine should serve /tokenize"
        )
    if not ours or not isinstance(theirs, list):
        return Finding(
            "warn",
            subject,
            "cannot be compared with the engine's",
            "/tokenize tells no token ids" if ours else "see the chat template above",
        )
    if differs:
        return Finding("fail", subject, f"{differs}: such bodies are matched as text",
                       "the engine was started with flags that change its chats (--chat-template, --default-chat-template-kwargs, "
                       "--reasoning-effort-map, --anthropic-disabled-thinking-effort): "
                       "give the gateway the same --chat-template, or leave them out")  # fmt: skip
    if ours == theirs:
        same, today = f"the engine makes the same {len(theirs)} tokens of a conversation", date.today()
        if day in (None, today):
            return Finding("ok", subject, same)
        return Finding("warn", subject, f"{same}, in which it prints {written(day)}: its time zone (TZ) is another than here, where it is {written(today)}",
                       "nothing to mend while all engines of the model print the same day; else start them with one TZ")  # fmt: skip
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return Finding("fail", subject, f"the engine's tokens differ from the gateway's at {at} (of {len(ours)} here, {len(theirs)} there)",
                   "the engine uses another tokenizer or chat template: give --model and --chat-template as it was started")  # fmt: skip


async def _blocks_arrive(trial: Trial, source: EventSource, text: str) -> AsyncIterator[Finding]:
    """Send the prompt while listening; its blocks must arrive, and be the ones the gateway would look for."""
    subject, cachemap = f"events {trial.id}", CacheMap(64 * 2**20)
    slot = cachemap.attach(trial.id, trial.replica.num_blocks, True)
    intake = EventIntake(
        cachemap,
        slot,
        endpoint=source.endpoint,
        replay=source.replay,
        topic="",
        decode=trial.replica.dialect.event_decoder(records),
        model=trial.served,
        block_size=trial.block_size,
        looks_ahead=trial.replica.looks_ahead,
        told=trial.told,
        page_size=trial.replica.page_size,
    )
    task = asyncio.create_task(intake.run())
    try:
        await _until(lambda: intake.state != "connecting", JOIN_SECONDS)
        before = intake.batches
        await trial.ask(text)
        if trial.pipeline is None:
            came = await _until(lambda: intake.batches > before, EVENT_SECONDS)
            yield Finding("ok", subject, f"arrive from {source.endpoint}") if came else _silent(trial, source)
            return
        hashes = trial.hashes(text)

        # If a prompt ends with a block, cache groups with sliding windows may lack the last block of a full hit.
        def found() -> bool:
            return cachemap.match(hashes, 0.0).confirmed[slot] >= len(hashes) - bool(cachemap.groups(slot))

        def told_otherwise() -> bool:  # not by replayed events of earlier prompts
            return intake.batches > before and intake.stored_as.size not in (0, trial.block_size)

        await _until(lambda: found() or told_otherwise(), EVENT_SECONDS)
        if intake.batches == before and trial.may_be_wider:  # the prompt may be too short for a block of several GPUs
            await trial.ask(new_prompt(WIDER * trial.block_size))
            await _until(lambda: intake.batches > before, EVENT_SECONDS)
        if found():
            yield Finding(
                "ok", subject, f"{len(hashes)} of {len(hashes)} blocks of a new prompt arrived from {source.endpoint}"
            )
            if source.replay is None or intake.unreplayed:
                yield _no_replay(trial, source)
            for problem in intake.problems:
                yield Finding("warn", subject, problem)
            asked = trial.replica.scrape.external_queries if trial.replica.scrape is not None else None
            told = cachemap.holds_below(slot) or intake.unreplayed or source.replay is None  # or it cannot be known
            if (asked or 0) >= UNTOLD_TOKENS and not told and not intake.blind:
                yield Finding(
                    "warn", f"tiers {trial.id}", TIERS_UNTOLD.format(asked), trial.replica.dialect.remedies.tiers
                )
        elif intake.batches == before:
            yield _silent(trial, source)
        elif trial.learn(intake.stored_as):
            async for finding in _blocks_arrive(trial, source, new_prompt(trial.block_size)):
                yield finding
        else:
            held = cachemap.match(hashes, 0.0).confirmed[slot]
            why = "; ".join(intake.problems) or (intake.reason if intake.state == "unobserved" else "")
            yield Finding("fail", subject, f"events arrive, but only {held} of a new prompt's {len(hashes)} blocks are the gateway's",
                          why or "the engine's tokens, block size or model name differ: see the lines above")  # fmt: skip
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _silent(trial: Trial, source: EventSource) -> Finding:
    # The engine does not report on which node a rank is; it only shows that nothing publishes where the other ranks do.
    elsewhere = ("; ranks on another node than the server that answers for them are not supported, their caches can only be guessed: "
                 f"{trial.replica.dialect.remedies.nodes}" if trial.replica.rank else "")  # fmt: skip
    return Finding("fail", f"events {trial.id}", f"silent: the engine stored new blocks, but nothing came from {source.endpoint} within {EVENT_SECONDS:g} s",
                   "check that this address can be reached from here, and that the engine binds it (tcp://*:PORT) with prefix caching on; "
                   f"else say where events are: --replica-url URL#events=tcp://HOST:PORT,replay=tcp://HOST:PORT{elsewhere}")  # fmt: skip


def _no_replay(trial: Trial, source: EventSource) -> Finding:
    what = f"nothing answers at {source.replay}" if source.replay else "no replay endpoint is known"
    return Finding("warn", f"replay {trial.id}", f"{what}. {NO_REPLAY}", trial.replica.dialect.remedies.replay)


def _cached_tokens(trial: Trial, path: str, reply: dict[str, Any]) -> Finding:
    subject, usage = f"cache {trial.id}", reply.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None and path != "/v1/completions":
        return Finding("ok", subject, f"answers of {path} never say how many prompt tokens were cached")
    if cached is None:
        return Finding("warn", subject, NO_CACHED_TOKENS, trial.replica.dialect.remedies.cached_tokens)
    if not cached:
        return Finding(
            "fail",
            subject,
            f"the same prompt of {usage.get('prompt_tokens')} tokens, sent twice, was not found in its cache",
            trial.replica.dialect.remedies.repeats,
        )
    return Finding("ok", subject, f"found {cached} of {usage.get('prompt_tokens')} tokens of a repeated prompt")


async def _until(true: Callable[[], bool], seconds: float) -> bool:
    """Return whether `true()` became true within this many seconds in which the event loop ran.

    While the loop is stalled, it reads no events.
    """

    async def become() -> None:
        while not true():
            await asyncio.sleep(0.02)

    try:
        await within(seconds, become())
    except TimeoutError:
        return False
    return True
