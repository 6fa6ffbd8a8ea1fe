"""The trials of `hitherto doctor`: short new prompts, sent to replicas, and checks of what must follow from them.

An engine must count the same tokens as the gateway, publish the blocks it stored as KV events that the gateway can
place, and find the blocks again when the prompt is sent once more. Where replicas have roles, one prompt is prefilled
on one replica and decoded on another, for each kind of pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import product
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson

from cachemap import CacheMap, EventIntake
from cachemap.events import records
from cachemap.events.records import UNTOLD, Blocks
from gateway.ops import chats
from gateway.ops.comparison import Unanswered, engine_answers
from gateway.ops.findings import Finding, fail, ok, warn
from gateway.ops.replica_checks import WORDS, Engine, ModelFiles
from replicas.adopt import engine_ids
from replicas.deadline import within
from replicas.engines.transfer import MeetingTransfer, Transfer, with_first
from replicas.event_source import EventSource
from replicas.names import bracketed
from replicas.pairing import obstacles
from replicas.problems import NO_CACHED_TOKENS, NO_REPLAY, TIERS_UNTOLD, Problem
from replicas.replica import Replica
from replicas.roles import BOTH, DECODERS, PREFILLERS
from replicas.served import base_names

# Endpoints that compute a prompt, and the field that holds it: for models that generate, embed or score.
ASKED_AT = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/classify": "input", "/pooling": "input"}
# Tokens looked up in slower tiers from which these should have sent events: they store pieces of at most 256 tokens
UNTOLD_TOKENS = 1024
WIDER = 8  # most GPUs that share a block: vLLM before 0.32 reports the size of one GPU's part, and events whole blocks
EVENT_SECONDS = 5.0  # vLLM publishes with the step that stores the blocks: tens of milliseconds
JOIN_SECONDS = 1.0  # a publisher without replay sends nothing before its first event
ANSWER_SECONDS = 60.0  # a loaded engine may queue the trial
IDS_SECONDS = 5.0  # for a prefiller to report its engines' ids
COMPLETIONS = "/v1/completions"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
LOG = "the engine's own log says more"


def turns(count: int) -> list[dict[str, str]]:
    """Return a conversation of `count` questions, with answers to all but the last question."""
    messages = [{"role": "system", "content": "You are a careful assistant. " + " ".join(WORDS)}]
    for number in range(count):
        messages.append({"role": "user", "content": f"Question {number}: what is {number} plus two?"})
        messages.append({"role": "assistant", "content": f"That is {number + 2}."})
    return messages[:-1]


def new_prompt(block_size: int) -> str:
    """Return a new random prompt of three full blocks and a bit, as each word has at least one token."""
    return secrets.token_hex(8) + " " + " ".join(secrets.choice(WORDS) for _ in range(3 * block_size + 8))


class Trial:
    """One replica to try, with its engine, and the files by which the gateway makes tokens of its model."""

    def __init__(self, engine: Engine, replica: Replica, files: ModelFiles):
        self.engine, self.replica, self.files = engine, replica, files
        self.pipeline, self.served = files.pipeline, files.served
        self.told: Blocks = UNTOLD  # the replica's block format, as its events show it
        self.remedies = replica.dialect.remedies

    @property
    def id(self) -> str:
        return self.replica.id

    @property
    def block_size(self) -> int:
        return self.engine.settings.block_size or self.replica.stored_size or self.replica.block_size or 16

    @property
    def may_be_wider(self) -> bool:
        """Whether blocks may have several times the reported tokens, and the context has room for some such blocks."""
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
            async with self.engine.way.session.post(
                url, json=body, headers={**self.replica.headers, **more}, timeout=deadline, allow_redirects=False
            ) as response:
                reply = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Refused(f"{path} does not answer: {str(error) or type(error).__name__}") from None
        if response.status in (401, 403):
            raise Locked
        if response.status != 200 or not isinstance(reply, dict):
            said = f"{path} answers {response.status}: {json.dumps(reply)[:200]}"
            raise (NotServed if response.status == 404 else Refused)(said)
        return reply

    async def ask(self, text: str) -> tuple[str, dict[str, Any]]:
        """Have the engine compute this prompt, and return the endpoint that took it, and the reply."""
        missing = []
        for path, prompt in ASKED_AT.items():
            more = {"max_tokens": 1, "temperature": 0} if path == COMPLETIONS else {}
            try:
                return path, await self.post(path, {"model": self.model, prompt: text, **more})
            except NotServed as error:
                missing.append(error)
        raise missing[0]

    def learn(self, told: Blocks) -> bool:
        """Apply the block format that events showed, and return whether a gateway would learn something new from it."""
        known, self.told = (self.block_size, self.replica.looks_ahead), told
        return self.replica.store_as(told.size, told.ahead, told.parts) and known != (self.block_size, told.ahead)

    def hashes(self, text: str) -> Sequence[int]:
        """Return the hashes of this prompt's blocks, which do not depend on the endpoint."""
        assert self.pipeline is not None
        self.pipeline.block_size, self.pipeline.looks_ahead = self.block_size, self.replica.looks_ahead
        return self.pipeline.prepare(COMPLETIONS, json.dumps({"prompt": text}).encode()).hashes


class Refused(Exception):
    """A replica did not answer a trial usefully."""


class NotServed(Refused):
    """The replica has no such endpoint, or no such model."""


class Locked(Exception):
    """A replica requires an API key, which the doctor does not have."""

    def __str__(self) -> str:
        return "it wants an API key"


async def try_replica(trial: Trial) -> AsyncIterator[Finding]:
    """Compare the replica's tokens, then have it compute a prompt twice, and watch its events and its cache."""
    try:
        async for finding in _trial(trial):
            yield finding
    except Locked:
        yield warn("it wants an API key, so its tokens, events and cache could not be tried", trial.remedies.models)
    except Refused as error:
        yield fail(str(error), LOG)


async def _trial(trial: Trial) -> AsyncIterator[Finding]:
    trial.files.follow(trial.engine.facts)
    if trial.pipeline is not None:
        if trial.pipeline.tokenizer is not None:
            yield await _same_tokenizer(trial)
        yield await _same_tokens(trial)
    problems, source, size = trial.engine.problems, trial.replica.events, trial.block_size
    if "caching" in problems:
        return  # reported already: without caching there are no events and no hits
    if source is None and not trial.engine.known:  # otherwise the gateway has said so
        problem = problems.get("events") or problems["ranks"]
        yield warn(problem.what, problem.remedy, f"events {trial.id}")
    text = new_prompt(size)
    if source is not None:
        async for finding in _blocks_arrive(trial, source, text):
            yield finding
    if source is None or trial.told.size > size:  # too short for a block of the size that events show
        text = new_prompt(max(size, trial.told.size))
        await trial.ask(text)
    yield _cached_tokens(trial, *await trial.ask(text))


async def _same_tokenizer(trial: Trial) -> Finding:
    """Compare the engine's ids of fixed texts with the gateway's, then read the tokenizer's files in its way."""
    subject, pipeline = f"tokenizer {trial.id}", trial.pipeline
    assert pipeline is not None
    try:
        answers = await engine_answers(trial.engine.way.session, trial.replica.url, trial.model, pipeline.fixed_texts())
    except Unanswered as error:
        doubt = f"; {doubt}: prompts are matched as text" if (doubt := pipeline.inexact()) else ""
        said = f"cannot be compared with the engine's: {error}{doubt}"
        return warn(said, "the engine should serve /tokenize to the gateway", subject)
    verdict = pipeline.judge(answers)
    if verdict.differs:
        said = f"is another than the gateway's, so prompts are matched as text: {verdict.differs}"
        remedy = "the engine has another tokenizer: give --model the folder or name that it was started with"
        return fail(said, remedy, subject)
    pipeline.adopt(verdict, True)
    return ok(f"makes the same tokens of {len(answers)} texts: {verdict.how}", subject=subject)


async def _engine_tokens(trial: Trial, messages: list[dict[str, str]]) -> Any:
    """Return the engine's token ids of a conversation.

    They come from /tokenize. Where engines do not use the template for chats, /tokenize may show what the template
    would give, so the ids are taken from the answer to a real chat of one token.
    """
    asked: dict[str, Any] = {"model": trial.model, "messages": messages}
    if trial.pipeline is not None and trial.pipeline.tokenizes_chats:
        return (await trial.post("/tokenize", asked)).get("tokens")
    return (await trial.post(chats.CHAT, asked | {"max_tokens": 1, "return_token_ids": True})).get("prompt_token_ids")


async def _same_tokens(trial: Trial) -> Finding:
    """Compare the engine's tokens of a conversation with the gateway's, and then those of the fixed chats.

    A gateway compares engines by the fixed chats when it adopts them.
    """
    subject, messages, day, differs = f"tokens {trial.id}", turns(2), None, ""
    pipeline, of_engine = trial.pipeline, (trial.engine.way.session, trial.replica.url, trial.model)
    assert pipeline is not None
    try:
        if pipeline.prints_date and len(printed := await chats.days_printed(*of_engine, pipeline)) == 1:
            day = min(printed)
        ours = pipeline.made(chats.CHAT, json.dumps({"messages": messages}).encode(), day)
        theirs = await _engine_tokens(trial, messages)
        for made in (chats.made_here, chats.efforts_here) if theirs == ours else ():
            if (bodies := [*made(pipeline, day)]) and not differs:
                differs = await chats.chats_differ(*of_engine, bodies)
                differs = "" if differs == chats.NOTHING_SHOWN and not pipeline.must_be_shown else differs
    except (Refused, chats.NotAsked, aiohttp.ClientError, TimeoutError) as error:
        said = f"cannot be compared with the engine's: {str(error) or type(error).__name__}"
        return warn(said, "the engine should serve /tokenize", subject)
    if not ours or not isinstance(theirs, list):
        remedy = "/tokenize tells no token ids" if ours else "see the chat template above"
        return warn("cannot be compared with the engine's", remedy, subject)
    if differs:
        return fail(f"{differs}: such bodies are matched as text",
                    "the engine was started with flags that change its chats (--chat-template, --default-chat-template-kwargs, "
                    "--reasoning-effort-map, --anthropic-disabled-thinking-effort): give the gateway the same --chat-template, "
                    "or leave them out", subject)  # fmt: skip
    if ours != theirs:
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((i for i, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
        said = f"the engine's tokens differ from the gateway's at {at} (of {len(ours)} here, {len(theirs)} there)"
        remedy = (
            "the engine uses another tokenizer or chat template: give --model and --chat-template as it was started"
        )
        return fail(said, remedy, subject)
    same, today = f"the engine makes the same {len(theirs)} tokens of a conversation", date.today()
    if day in (None, today):
        return ok(same, subject=subject)
    zone = f"its time zone (TZ) is another than here, where it is {chats.written(today)}"
    remedy = "nothing to mend while all engines of the model print the same day; else start them with one TZ"
    return warn(f"{same}, in which it prints {chats.written(day)}: {zone}", remedy, subject)


async def _blocks_arrive(trial: Trial, source: EventSource, text: str) -> AsyncIterator[Finding]:
    """Send the prompt while listening; its blocks must arrive, and be the ones that the gateway would look for."""
    subject, cachemap, replica = f"events {trial.id}", CacheMap(64 * 2**20), trial.replica
    slot = cachemap.attach(trial.id, replica.num_blocks, True)
    intake = EventIntake(
        cachemap, slot, endpoint=source.endpoint, replay=source.replay, topic="", decode=replica.dialect.event_decoder(records),
        model=trial.served, block_size=trial.block_size, looks_ahead=replica.looks_ahead, told=trial.told, page_size=replica.page_size,
    )  # fmt: skip
    task = asyncio.create_task(intake.run())
    try:
        await _until(lambda: intake.state != "connecting", JOIN_SECONDS)
        before = intake.batches
        await trial.ask(text)
        if trial.pipeline is None:
            came = await _until(lambda: intake.batches > before, EVENT_SECONDS)
            yield ok(f"arrive from {source.endpoint}", subject=subject) if came else _silent(trial, source)
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
            count = len(hashes)
            yield ok(f"{count} of {count} blocks of a new prompt arrived from {source.endpoint}", subject=subject)
            if source.replay is None or intake.unreplayed:
                what = f"nothing answers at {source.replay}" if source.replay else "no replay endpoint is known"
                yield warn(f"{what}. {NO_REPLAY}", trial.remedies.replay, f"replay {trial.id}")
            for problem in intake.problems:
                yield warn(problem, subject=subject)
            asked = replica.scrape.external_queries if replica.scrape is not None else None
            told = cachemap.holds_below(slot) or intake.unreplayed or source.replay is None  # or it cannot be known
            if (asked or 0) >= UNTOLD_TOKENS and not told and not intake.blind:
                yield warn(TIERS_UNTOLD.format(asked), trial.remedies.tiers, f"tiers {trial.id}")
        elif intake.batches == before:
            yield _silent(trial, source)
        elif trial.learn(intake.stored_as):
            async for finding in _blocks_arrive(trial, source, new_prompt(trial.block_size)):
                yield finding
        else:
            held = cachemap.match(hashes, 0.0).confirmed[slot]
            why = "; ".join(intake.problems) or (intake.reason if intake.state == "unobserved" else "")
            said = f"events arrive, but only {held} of a new prompt's {len(hashes)} blocks are the gateway's"
            differ = "the engine's tokens, block size or model name differ: see the lines above"
            yield fail(said, why or differ, subject)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _silent(trial: Trial, source: EventSource) -> Finding:
    # The engine does not report on which node a rank is; it only shows that nothing publishes where the other ranks do.
    elsewhere = ("; ranks on another node than the server that answers for them are not supported, their caches can only be "
                 f"guessed: {trial.remedies.nodes}" if trial.replica.rank else "")  # fmt: skip
    return fail(f"silent: the engine stored new blocks, but nothing came from {source.endpoint} within {EVENT_SECONDS:g} s",
                "check that this address can be reached from here, and that the engine binds it (tcp://*:PORT) with prefix caching on; "
                f"else say where events are: --replica-url URL#events=tcp://HOST:PORT,replay=tcp://HOST:PORT{elsewhere}",
                f"events {trial.id}")  # fmt: skip


def _cached(reply: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return how many prompt tokens an answer reports as cached, and how many prompt tokens there were."""
    usage = reply.get("usage") or {}
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens"), usage.get("prompt_tokens")


def _cached_tokens(trial: Trial, path: str, reply: dict[str, Any]) -> Finding:
    subject, (cached, tokens) = f"cache {trial.id}", _cached(reply)
    if cached is None and path != COMPLETIONS:
        return ok(f"answers of {path} never say how many prompt tokens were cached", subject=subject)
    if cached is None:
        return warn(NO_CACHED_TOKENS, trial.remedies.cached_tokens, subject)
    if not cached:
        said = f"the same prompt of {tokens} tokens, sent twice, was not found in its cache"
        return fail(said, trial.remedies.repeats, subject)
    return ok(f"found {cached} of {tokens} tokens of a repeated prompt", subject=subject)


async def _until(true: Callable[[], bool], seconds: float) -> bool:
    """Return whether `true()` became true within this many seconds in which the event loop ran.

    Time in which the loop is stalled does not count, since no events are read then.
    """

    async def become() -> None:
        while not true():
            await asyncio.sleep(0.02)

    try:
        await within(seconds, become())
    except TimeoutError:
        return False
    return True


class Pair:
    """A prefiller and a decoder between which the gateway would split a request into two legs (prompt and answer)."""

    def __init__(self, first: Trial, second: Trial, transfer: Transfer):
        self.id, self.first, self.second, self.transfer = first.id, first, second, transfer
        body = {"model": first.model, "prompt": new_prompt(first.block_size), "max_tokens": 4, "temperature": 0}
        self.body = orjson.dumps(body)
        self.remedy = first.remedies.transfer  # of an engine that passes no cache on

    @property
    def done(self) -> Finding:
        return ok(f"{self.second.id} answered a prompt that was computed there ({self.transfer.name})")


def pairs(trials: Sequence[Trial]) -> Iterator[Pair]:
    """Yield a pair of each kind of prefiller and each kind of decoder of one model.

    Replicas of one role are of one kind if their engine, traits and KV transfer are the same: pairs of the same two
    kinds fail alike, except for addresses and networks.
    """

    def kind(one: Replica) -> tuple[Any, ...]:
        return one.dialect.id, one.traits, one.moves_by, one.role

    apart = any(one.replica.role != BOTH for one in trials)
    tried: set[tuple[Any, ...]] = set()
    for first, second in product(trials, trials) if apart else ():
        one, other = first.replica, second.replica
        kinds, transfer = (kind(one), kind(other)), one.transfer
        if one.role not in PREFILLERS or other.role not in DECODERS or first is second or kinds in tried:
            continue
        if transfer is None or transfer is not other.transfer or obstacles(one.traits, other.traits, transfer):
            continue  # `roles` has said so
        tried.add(kinds)
        yield Pair(first, second, transfer)


async def try_transfer(pair: Pair) -> AsyncIterator[Finding]:
    """Have a prompt prefilled on one replica and decoded on the other, as the gateway would."""
    at_once = isinstance(pair.transfer, MeetingTransfer)
    way = _at_once if at_once else _relayed if pair.transfer.header else _in_turn
    try:
        yield await way(pair)
    except Locked as locked:
        yield warn(f"{locked}, so no transfer could be tried", pair.first.remedies.models)


async def _in_turn(pair: Pair) -> Finding:
    """Send the gateway's two legs, one after the other."""
    first, second, transfer = pair.first, pair.second, pair.transfer
    try:
        parameters = await _first_leg(pair, first)
    except (Refused, ValueError) as error:
        return fail(f"it did not compute a first leg: {error}", LOG)
    if not parameters:
        return fail(f"it computed a prompt and kept nothing for another replica ({transfer.name})", pair.remedy)
    try:
        await second.post(COMPLETIONS, orjson.loads(transfer.second_body(pair.body, parameters)))
    except Refused as error:
        at = transfer.fetched_from(parameters)
        where = f", which is to fetch the cache at {at}," if at else ""
        reach = f"; {at} has to be reached from {second.id}: {pair.remedy}" if at else ""
        return fail(f"{second.id}{where} did not answer the second leg: {error}", f"see the log of {second.id}{reach}")
    if isinstance(transfer, type(second.replica.dialect.transfer)):
        # An engine without a connector computes the prompt again and answers all the same. Engines that can fetch can
        # also keep, so a first leg sent to the second replica shows whether it has a connector.
        kept, said = True, "answered, but keeps no cache for others itself: it may have computed the prompt again"
        with contextlib.suppress(Refused, ValueError):
            kept = await _first_leg(pair, second)
        return pair.done if kept else warn(f"{second.id} {said}", second.remedies.transfer)
    return pair.done


async def _first_leg(pair: Pair, trial: Trial) -> Any:
    """Return the parameters of the transfer from the answer to a first leg. Raises Refused, Locked and ValueError."""
    leg = pair.transfer.first_body(COMPLETIONS, pair.body)
    assert leg is not None
    return pair.transfer.parameters(orjson.dumps(await trial.post(COMPLETIONS, orjson.loads(leg))))


async def _at_once(pair: Pair) -> Finding:
    """Send the gateway's two legs at the same time; each waits for the other, so one fault shows on both sides."""
    first, second, transfer = pair.first, pair.second, pair.transfer
    assert isinstance(transfer, MeetingTransfer)
    problem = await engine_ids(first.engine.way.session, first.replica, IDS_SECONDS)
    if problem is not None or (meeting := first.replica.meeting) is None:
        return fail(*(problem or Problem("nobody knows where it is met", pair.remedy)))
    leg = transfer.first_body(COMPLETIONS, pair.body)
    assert leg is not None
    for_first, for_second = transfer.meet(meeting)
    asked = (
        first.post(COMPLETIONS, orjson.loads(with_first(leg, for_first))),
        second.post(COMPLETIONS, orjson.loads(transfer.second_body(pair.body, for_second))),
    )
    answers = await asyncio.gather(*asked, return_exceptions=True)
    said = "; ".join(str(one) or type(one).__name__ for one in answers if isinstance(one, BaseException))
    at = f"{bracketed(meeting.host)}:{meeting.port} has to be reached from {second.id}: {pair.remedy}"
    failed = f"{second.id} did not answer a prompt that was computed there: {said}"
    return fail(failed, f"see the logs of both; {at}") if said else pair.done


async def _relayed(pair: Pair) -> Finding:
    """Send one request to the proxy in front of the decoder, which has the prompt computed itself."""
    second, replica, transfer = pair.second, pair.first.replica, pair.transfer
    header, at = transfer.header.decode(), f"{bracketed(replica.address or replica.host)}:{replica.port}"
    try:
        await second.post(COMPLETIONS, orjson.loads(pair.body), {header: at})
    except (Refused, Locked) as error:
        remedy = f"has to be reached from {second.id}, and to be on its list of those that it may ask, if it has one"
        return fail(f"{second.id} did not have a prompt computed at {at}: {error}", f"{at} {remedy}")
    try:
        cached, _ = _cached(await pair.first.post(COMPLETIONS, orjson.loads(pair.body)))
    except Refused as error:
        return fail(f"it does not answer: {error}", LOG)
    if cached is None:
        said = "whether the prompt was computed here nobody tells, without cached tokens in usage"
        return ok(f"{second.id} answered; {said}")
    said = f"{second.id} answered, and the prompt was never computed at {at}: it does not read {header}"
    remedy = f"give the URL of {transfer.name} in place of its engine's, or leave transfer= out"
    return pair.done if cached else fail(said, remedy)
