"""The trials of `hitherto doctor`: it sends short new prompts to replicas and checks what they do with them.

An engine must make the same tokens as the gateway. It must publish the blocks that it stored as KV events that the
gateway can match with prompts. And it must find the blocks again when the prompt is sent once more. If replicas have
roles, one prompt is also prefilled on one replica and decoded on another, for each kind of pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import product
from typing import Any

import aiohttp
import orjson

from cachemap import CacheMap, EventIntake
from cachemap.events import records
from cachemap.events.records import UNTOLD, Blocks
from gateway.ops.comparison import TokenizerComparison
from gateway.ops.findings import Finding, fail, ok, warn
from gateway.ops.replica_checks import WORDS, Engine, ModelFiles
from replicas.deadline import within
from replicas.engines.transfer import MeetingTransfer, Transfer
from replicas.event_source import EventSource
from replicas.pairing import obstacles
from replicas.problems import NO_CACHED_TOKENS, NO_REPLAY, TIERS_UNTOLD
from replicas.replica import Replica
from replicas.roles import BOTH, DECODERS, PREFILLERS
from replicas.served import base_names

COMPLETIONS = "/v1/completions"
# Endpoints that compute a prompt, for models that generate, embed or score, and the field that has the prompt.
ASKED_AT = {COMPLETIONS: "prompt", "/v1/embeddings": "input", "/classify": "input", "/pooling": "input"}
# Tokens looked up in slower tiers after which the tiers should have sent events: their pieces have 256 tokens at most
UNTOLD_TOKENS = 1024
WIDER = 8  # the most GPUs that share a block: vLLM before 0.32 reports the size of one GPU's part, its events the whole
EVENT_SECONDS = 5.0  # vLLM publishes with the step that stores the blocks: tens of milliseconds
JOIN_SECONDS = 1.0  # to wait for a connection: a publisher without replay sends nothing before its first event
ANSWER_SECONDS = 15.0  # a loaded engine may queue the trial; with more time, many full engines take minutes to check
LOG = "the engine's own log says more"
OTHER_TOKENS = (
    "the engine uses another tokenizer or chat template, or flags that change its chats (--chat-template, "
    "--default-chat-template-kwargs, --reasoning-effort-map): give --model and --chat-template as it was started"
)


def new_prompt(block_size: int) -> str:
    """Return a new random prompt that fills at least three blocks of `block_size` tokens.

    It has as many words as it needs tokens, since each word has at least one token.
    """
    return secrets.token_hex(8) + " " + " ".join(secrets.choice(WORDS) for _ in range(3 * block_size + 8))


class Trial:
    """One replica to try, with its engine, and the model's files from which the gateway makes tokens."""

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
    def model(self) -> str:
        own = base_names(self.replica.models)
        return self.served if self.served in own or not own else own[0]

    @property
    def may_be_wider(self) -> bool:
        """Whether the engine's blocks may be larger than it reports, and a prompt of such blocks fits its context.

        They may if the engine does not report the block size of its attention layers.
        """
        replica = self.replica
        told = replica.scrape.attention_block_size if replica.scrape is not None else None
        return not told and (replica.max_model_len or 0) > 8 * WIDER * self.block_size

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post a request to the replica and return its JSON answer. Raises Refused or a subclass if there is none."""
        try:
            url, deadline = self.replica.url + path, aiohttp.ClientTimeout(ANSWER_SECONDS)
            async with self.engine.way.session.post(
                url, json=body, headers=self.replica.headers, timeout=deadline, allow_redirects=False
            ) as response:
                reply = await response.json(content_type=None)
        except TimeoutError:
            waiting = self.engine.facts.scrape.waiting if self.engine.facts.scrape else None
            said = f"{path} does not answer a short prompt within {ANSWER_SECONDS:g} s; {waiting or 'no known'} requests wait"
            raise Busy(said) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise Refused(f"{path} does not answer: {str(error) or type(error).__name__}") from None
        if response.status in (401, 403):
            raise Locked("it wants an API key, so it could not be tried")
        if response.status != 200 or not isinstance(reply, dict):
            said = f"{path} answers {response.status}: {json.dumps(reply)[:200]}"
            raise (NotServed if response.status == 404 else Refused)(said)
        return reply

    async def ask(self, text: str) -> tuple[str, dict[str, Any]]:
        """Have the engine compute this prompt; return the path of the endpoint that took it, and the JSON answer.

        Each of the endpoints in ASKED_AT is tried until one is served. Raises Refused.
        """
        missing = []
        for path, prompt in ASKED_AT.items():
            more = {"max_tokens": 1, "temperature": 0} if path == COMPLETIONS else {}
            try:
                return path, await self.post(path, {"model": self.model, prompt: text, **more})
            except NotServed as error:
                missing.append(error)
        raise missing[0]

    def learn(self, told: Blocks) -> bool:
        """Use the block format that KV events show from now on; return whether it changes the hashes of prompts."""
        known, self.told = (self.block_size, self.replica.looks_ahead), told
        return self.replica.store_as(told.size, told.ahead, told.parts) and known != (self.block_size, told.ahead)

    def hashes(self, text: str) -> Sequence[int]:
        """Return the hashes of this prompt's blocks, as the gateway computes them.

        They do not depend on the endpoint that the prompt is sent to.
        """
        assert self.pipeline is not None
        self.pipeline.block_size, self.pipeline.looks_ahead = self.block_size, self.replica.looks_ahead
        return self.pipeline.prepare(COMPLETIONS, json.dumps({"prompt": text}).encode()).hashes


class Refused(Exception):
    """Raised if a replica gave no usable answer to a trial's request."""


class NotServed(Refused):
    """Raised if the replica does not have the endpoint, or the model (status 404)."""


class Locked(Refused):
    """Raised if the replica requires an API key that the doctor does not have (status 401 or 403)."""


class Busy(Refused):
    """Raised if the replica did not answer within ANSWER_SECONDS; it may have too much to do."""


async def try_replica(trial: Trial) -> AsyncIterator[Finding]:
    """Try one replica: compare its tokens with the gateway's, then send it a new prompt twice.

    The prompt's blocks have to arrive as KV events after the first time, and to be found in the cache the second time.
    """
    try:
        async for finding in _trial(trial):
            yield finding
    except Refused as error:
        yield _not_tried(trial, error, str(error))


def _not_tried(trial: Trial, error: Exception, said: str, remedy: str = LOG) -> Finding:
    """Return the finding that the replica could not be tried because of `error`.

    It is a warning if the replica requires an API key or has too much to do, else a failure. `said`: the finding's
    text. `remedy`: what to do about a failure.
    """
    remedies = {Locked: trial.remedies.models, Busy: "run the doctor again when the engine has less to do"}
    return (warn if type(error) in remedies else fail)(said, remedies.get(type(error), remedy))


async def _trial(trial: Trial) -> AsyncIterator[Finding]:
    trial.files.follow(trial.engine.facts)
    if trial.pipeline is not None and trial.pipeline.tokenizer is not None:
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


async def _same_tokens(trial: Trial) -> Finding:
    """Compare the engine's tokens of fixed texts and chats with the gateway's; running gateways do the same."""
    subject, pipeline = f"tokens {trial.id}", trial.pipeline
    assert pipeline is not None
    found = await TokenizerComparison(lambda: pipeline, is_single=True).compare_once(trial.replica)
    if found.differs or (found.chats and not found.unasked):
        return fail(f"it {found.said}: what differs is matched as text", OTHER_TOKENS, subject)
    if found.efforts:
        return fail(f"with an effort to reason {found.efforts}: such bodies are matched as text", OTHER_TOKENS, subject)
    if "cannot be compared" in found.said:
        return warn(found.said, "the engine should serve /tokenize to the gateway", subject)
    if found.day:
        remedy = "nothing to mend while all engines of the model print the same day; else start them with one TZ"
        return warn(found.said, remedy, subject)
    return ok(found.said, subject=subject)


async def _blocks_arrive(trial: Trial, source: EventSource, text: str) -> AsyncIterator[Finding]:
    """Send the prompt while listening to KV events, and check that the events have the prompt's blocks.

    The block hashes must be those that the gateway computes for this prompt. If the events show another block format
    than the engine reports, the check is repeated with that format. `source`: where the replica publishes its KV
    events.
    """
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

        # If a prompt ends at the end of a block, a cache group with a sliding window may lack the prompt's last block.
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
    # No engine reports on which node a rank runs. That it runs on another node shows only in that nothing is published
    # for the rank where the other ranks publish.
    elsewhere = ("; ranks on another node than the server that answers for them are not supported, their caches can only be "
                 f"guessed: {trial.remedies.nodes}" if trial.replica.rank else "")  # fmt: skip
    return fail(f"silent: the engine stored new blocks, but nothing came from {source.endpoint} within {EVENT_SECONDS:g} s",
                "check that this address can be reached from here, and that the engine binds it (tcp://*:PORT) with prefix caching on; "
                f"else say where events are: --replica-url URL#events=tcp://HOST:PORT,replay=tcp://HOST:PORT{elsewhere}",
                f"events {trial.id}")  # fmt: skip


def _cached_tokens(trial: Trial, path: str, reply: dict[str, Any]) -> Finding:
    subject, usage = f"cache {trial.id}", reply.get("usage") or {}
    cached, tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens"), usage.get("prompt_tokens")
    if cached is None and path != COMPLETIONS:
        return ok(f"answers of {path} never say how many prompt tokens were cached", subject=subject)
    if cached is None:
        return warn(NO_CACHED_TOKENS, trial.remedies.cached_tokens, subject)
    if not cached:
        said = f"the same prompt of {tokens} tokens, sent twice, was not found in its cache"
        return fail(said, trial.remedies.repeats, subject)
    return ok(f"found {cached} of {tokens} tokens of a repeated prompt", subject=subject)


async def _until(true: Callable[[], bool], seconds: float) -> bool:
    """Wait until `true()` is true, for up to `seconds`, and return whether it became true.

    Time in which the event loop is stalled does not count, since no events are read then.
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
    """Two replicas between which a gateway would split a request: one computes the prompt, the other the answer.

    `first`: the replica that prefills. `second`: the replica that decodes. `transfer`: how the KV cache moves.
    """

    def __init__(self, first: Trial, second: Trial, transfer: Transfer):
        self.id, self.first, self.second, self.transfer = first.id, first, second, transfer
        body = {"model": first.model, "prompt": new_prompt(first.block_size), "max_tokens": 4, "temperature": 0}
        self.body = orjson.dumps(body)


def pairs(trials: Sequence[Trial]) -> Iterator[Pair]:
    """Yield one pair for each combination of a kind of prefill replica and a kind of decode replica of one model.

    Replicas with the same role, engine, traits and KV transfer are of one kind. Pairs of the same two kinds fail alike,
    except for faults of addresses and networks. Two sorts of transfers are left out: those for which both requests must
    run at the same time, and those that a proxy in front of the decode replica starts.
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
        if not (transfer.header or isinstance(transfer, MeetingTransfer)):
            tried.add(kinds)
            yield Pair(first, second, transfer)


async def try_transfer(pair: Pair) -> AsyncIterator[Finding]:
    """Let one replica prefill a prompt and the other decode its answer, with the two requests that a gateway sends."""
    first, second, transfer = pair.first, pair.second, pair.transfer
    try:
        parameters = await _first_leg(pair, first)
    except (Refused, ValueError) as error:
        yield _not_tried(first, error, f"it did not compute a first leg: {error}")
        return
    if not parameters:
        said = f"it computed a prompt and kept nothing for another replica ({transfer.name})"
        yield fail(said, first.remedies.transfer)
        return
    try:
        await second.post(COMPLETIONS, orjson.loads(transfer.second_body(pair.body, parameters)))
    except Refused as error:
        at = transfer.fetched_from(parameters)
        where = f", which is to fetch the cache at {at}," if at else ""
        reach = f"; {at} has to be reached from {second.id}: {first.remedies.transfer}" if at else ""
        said = f"{second.id}{where} did not answer the second leg: {error}"
        yield _not_tried(second, error, said, f"see the log of {second.id}{reach}")
        return
    # An engine without a KV connector computes the prompt again and answers all the same. An engine that can fetch KV
    # cache can also keep it for others, so a first leg sent to the second replica shows whether it has a connector.
    kept: Any = True
    if isinstance(transfer, type(second.replica.dialect.transfer)):
        with contextlib.suppress(Refused, ValueError):
            kept = await _first_leg(pair, second)
    if kept:
        yield ok(f"{second.id} answered a prompt that was computed there ({transfer.name})")
    else:
        said = "answered, but keeps no cache for others itself: it may have computed the prompt again"
        yield warn(f"{second.id} {said}", second.remedies.transfer)


async def _first_leg(pair: Pair, trial: Trial) -> Any:
    """Let a replica prefill the pair's prompt, and return the KV transfer parameters in its answer.

    They are empty or None if the replica keeps nothing for another one. Raises Refused and ValueError.
    """
    leg = pair.transfer.first_body(COMPLETIONS, pair.body)
    assert leg is not None
    return pair.transfer.parameters(orjson.dumps(await trial.post(COMPLETIONS, orjson.loads(leg))))
