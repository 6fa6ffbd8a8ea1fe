"""The gateway's tokenizer against the engines': each engine is asked for the ids of fixed texts when it is adopted.

What files a tokenizer is made of does not tell how an engine reads them (see `prompt.reading`), and flags like
`--tokenizer` are not to be seen from outside. So no tokenizer is believed to be the engine's because it has the same
name: the ids of some twenty texts have to be the same. An engine that reads the files in another known way is followed;
the prompts of a model whose engine makes other tokens are matched as text, and their ids are never sent to it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp

from replicas import Replica
from replicas.access import session_to
from replicas.engines.dialect import Tokenizing
from replicas.served import base_names

from ..prompt.pipeline import Pipeline, Verdict
from ..prompt.tokens.agreement import Answer
from .chats import Made, NotAsked, chats_differ, made_here

log = logging.getLogger("hitherto")

ANSWER_SECONDS = 10.0
AT_ONCE = 4  # questions to one engine, which may be busy with prompts
PAUSES = (1.0, 5.0, 30.0)  # seconds before an engine that did not answer is asked again


class Unanswered(Exception):
    """The engine does not tell what tokens it makes. `final`: asking again would not help."""

    def __init__(self, why: str, final: bool = False):
        super().__init__(why)
        self.final = final


async def engine_answers(
    session: aiohttp.ClientSession, url: str, model: str | None, texts: list[str], how: Tokenizing
) -> list[Answer]:
    """What /tokenize says of each text, without and with special tokens. Raises Unanswered."""
    gate = asyncio.Semaphore(AT_ONCE)
    specials = (False, True) if how.chooses_special else (True,)

    async def ask(text: str, special: bool) -> Answer:
        body: dict[str, Any] = {"prompt": text}
        if how.chooses_special:
            body["add_special_tokens"] = special
        if model is not None:
            body["model"] = model
        async with (
            gate,
            session.post(url + how.path, json=body, timeout=aiohttp.ClientTimeout(ANSWER_SECONDS)) as response,
        ):
            if response.status in (401, 403):
                raise Unanswered(
                    "/tokenize wants an API key, and not the one that the gateway has: give it with --engine-api-key @FILE",
                    final=True,
                )
            if response.status != 200:
                raise Unanswered(f"/tokenize answers {response.status}", response.status < 500)
            try:
                told = json.loads(await response.read())
            except ValueError:
                told = None
        ids = told.get("tokens") if isinstance(told, dict) else None
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise Unanswered("/tokenize tells no token ids", final=isinstance(told, dict))
        return Answer(text, special, ids)

    try:
        return await asyncio.gather(*(ask(text, special) for text in texts for special in specials))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unanswered(f"/tokenize does not answer: {error or type(error).__name__}") from None


@dataclass(slots=True, eq=False)
class _Engine:
    """What was found of one process behind an engine's address. Until it has been compared, what was found of its
    predecessor."""

    incarnation: str
    pipeline: Pipeline  # that it is compared with
    replicas: dict[str, Replica] = field(default_factory=dict)  # its ranks, by id
    said: str = "not compared yet"
    how: str = ""  # "" where nothing is known
    differs: str = ""
    proven: bool = False  # to fill its chat template as the gateway does
    unproven: str = ""  # why it cannot be asked how it fills it
    compared: bool = False
    names: frozenset[str] = frozenset()  # its models and adapters, as they were when prompts were last settled

    def tell(self, said: str) -> None:
        self.said = said
        for replica in self.replicas.values():
            replica.tokenizer = said

    def names_now(self) -> frozenset[str]:
        return frozenset(name for replica in self.replicas.values() for name in replica.models)


class TokenizerComparison:
    """Compares each engine once, and keeps the pipeline at what was found."""

    def __init__(self, pipeline: Callable[[], Pipeline], judged: Callable[[], None] = lambda: None):
        """`judged` is called after an engine was compared."""
        self._judged = judged
        self._pipeline = pipeline
        self._engines: dict[str, _Engine] = {}
        self._comparing: dict[str, asyncio.Task[None]] = {}  # by engine
        self._running: set[asyncio.Task[None]] = set()  # these, and those that only adopt
        self._chats: tuple[Pipeline | None, str, list[Made]] = (None, "", [])  # as files are read: fixed ones with ids
        # Judging and adopting take turns: both load tokenizers, and what is judged is held against the one in use.
        self._turn = asyncio.Lock()

    def compare(self, replica: Replica) -> None:
        """Once for each process behind an engine's address, and for each tokenizer of the gateway. To be called again
        when the replica's models change."""
        pipeline = self._pipeline()
        if pipeline.tokenizer is None:
            return
        old = self._engines.get(replica.engine)
        if old is not None and old.incarnation == replica.incarnation and old.pipeline is pipeline:
            old.replicas[replica.id] = replica
            replica.tokenizer = old.said
            if (old.compared or old.differs) and old.names_now() != old.names:
                self._run(self._adopt(pipeline))
            return
        engine = self._engines[replica.engine] = _Engine(replica.incarnation, pipeline, {replica.id: replica})
        engine.tell(engine.said)
        self._stop_comparing(replica.engine)
        if old is not None and old.pipeline is pipeline and old.how:
            # Most likely it is the same engine again. Its files are not read another way for the second that this
            # takes.
            engine.how, engine.differs = old.how, old.differs
            self._run(self._adopt(pipeline))
        self._comparing[replica.engine] = self._run(self._compare(replica, engine))

    def set_apart(self) -> set[str]:
        """Engines whose tokens are not those of others that were compared here."""
        compared = {id: one for id, one in self._engines.items() if one.compared and one.pipeline is self._pipeline()}
        alike = {one.how for one in compared.values() if not one.differs}
        in_use = reading.how if (reading := self._pipeline().reading) is not None else ""
        return {id for id, one in compared.items() if one.differs or one.how != in_use} if in_use in alike else set()

    def forget(self, engine: str) -> None:
        """It is gone."""
        self._stop_comparing(engine)
        if (gone := self._engines.pop(engine, None)) is not None and gone.how:
            self._run(self._adopt(self._pipeline()))

    def stop(self) -> None:
        for task in self._running:
            task.cancel()

    def _stop_comparing(self, engine: str) -> None:
        if (task := self._comparing.pop(engine, None)) is not None:
            task.cancel()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("comparing tokenizers failed", exc_info=error)

        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(ended)
        return task

    async def _compare(self, replica: Replica, engine: _Engine) -> None:
        id, pipeline = replica.engine, engine.pipeline
        try:
            answers = await self._answers(replica, pipeline.fixed_texts())
        except Unanswered as why:
            if pipeline is not self._pipeline():
                return
            engine.how = engine.differs = ""
            if pipeline.shows_chats or not replica.dialect.fills_templates_alike:
                engine.unproven = f"nothing shows what tokens it makes: {why}"
            self._differ(pipeline)
            engine.tell(f"cannot be compared: {why}")
            await self._adopt(pipeline)
            log.warning("replica %s: whether it makes the gateway's tokens cannot be compared: %s%s", id, why,
                        f"; {inexact}, so its prompts are matched as text" if (inexact := pipeline.inexact()) else "")  # fmt: skip
            return
        async with self._turn:
            verdict = await asyncio.get_running_loop().run_in_executor(None, pipeline.judge, answers)
        if pipeline is not self._pipeline():
            return  # the engine is compared with the one in use as soon as that is loaded
        engine.how, engine.differs, engine.compared = verdict.how, verdict.differs, True
        if verdict.differs:
            self._differ(pipeline)
        engine.tell(f"differs: {verdict.differs}" if verdict.differs else f"the gateway's, {verdict.how}")
        if verdict.differs:
            log.error("replica %s has another tokenizer than the gateway: %s. Prompts of its models are matched as text; "
                      "give the gateway the same --model. `hitherto doctor` compares them", id, verdict.differs)  # fmt: skip
        else:
            log.info("replica %s: same token ids as the gateway for %d texts (%s)", id, len(answers), verdict.how)
        await self._adopt(pipeline, verdict)
        if not verdict.differs and (pipeline.shows_chats or not replica.dialect.fills_templates_alike):
            await self._compare_chats(replica, engine)
        self._judged()

    async def _compare_chats(self, replica: Replica, engine: _Engine) -> None:
        """Until the engine has answered: what cannot be asked now is asked again, and matched as text after a while."""
        said = engine.said
        for asked in count(1):
            if (pipeline := self._pipeline()) is not engine.pipeline or not pipeline.renderers:
                return
            try:
                differs = await self._differing_chats(replica, pipeline)
                break
            except (NotAsked, aiohttp.ClientError, TimeoutError) as error:
                why = f"its chats cannot be compared yet: {error or type(error).__name__}"
            if pipeline is not self._pipeline():
                return
            if asked > len(PAUSES):
                first, engine.unproven = not engine.unproven, why
                self._differ(pipeline)
                engine.tell(why)
                if first:
                    log.warning("replica %s: %s. Prompts of its models are matched as text until it answers", replica.engine, why)  # fmt: skip
                    await self._adopt(pipeline)
                    self._judged()
            await asyncio.sleep(PAUSES[min(asked, len(PAUSES)) - 1])
        if pipeline is not self._pipeline():
            return
        engine.proven, engine.unproven, engine.differs = not differs, "", differs
        self._differ(pipeline)
        engine.tell(f"differs: {differs}" if differs else f"{said}; fills its chat template alike")
        if differs:
            log.error("replica %s: %s. Prompts of its models are matched as text; give the gateway the --chat-template that it "
                      "was started with. `hitherto doctor` compares them", replica.engine, differs)  # fmt: skip
        await self._adopt(pipeline)

    async def _differing_chats(self, replica: Replica, pipeline: Pipeline) -> str:
        model, timeout = next(iter(base_names(replica.models)), None), aiohttp.ClientTimeout(ANSWER_SECONDS)
        async with session_to(replica.address, replica.tls, headers=replica.credentials, timeout=timeout) as session:
            return await chats_differ(session, replica.url, model, self._chats_of(pipeline))

    def _chats_of(self, pipeline: Pipeline) -> list[Made]:
        """Made before prompts were matched as text because an engine did not answer."""
        how = pipeline.reading.how if pipeline.reading is not None else ""
        if not self._chats[2] or self._chats[0] is not pipeline or self._chats[1] != how:
            self._chats = (pipeline, how, [*made_here(pipeline)])
        return self._chats[2]

    async def _answers(self, replica: Replica, texts: list[str]) -> list[Answer]:
        model = next(iter(base_names(replica.models)), None)
        async with session_to(replica.address, replica.tls, headers=replica.credentials) as session:
            for pause in PAUSES:
                try:
                    return await engine_answers(session, replica.url, model, texts, replica.dialect.tokenizing)
                except Unanswered as why:
                    if why.final:
                        raise
                await asyncio.sleep(pause)
            return await engine_answers(session, replica.url, model, texts, replica.dialect.tokenizing)

    async def _adopt(self, pipeline: Pipeline, found: Verdict | None = None) -> None:
        """Read the files as the engines do that were compared; where they differ, as the first one does."""
        async with self._turn:
            if pipeline is not self._pipeline():
                return
            known = [one for one in self._engines.values() if one.pipeline is pipeline and one.how and not one.differs]
            how = next((one.how for one in sorted(known, key=lambda one: not one.compared)), None)
            loop = asyncio.get_running_loop()
            if how is None:  # nobody has said; as engines of that version do
                verdict = await loop.run_in_executor(None, pipeline.likeliest)
            elif found is not None and found.how == how and found.loaded is not None:
                verdict = found
            else:  # which loads nothing if it is the way in use
                verdict = await loop.run_in_executor(None, pipeline.read_as, how)
            if pipeline is self._pipeline():
                pipeline.adopt(verdict, any(one.compared for one in known), self._differing(pipeline, how))

    def _differ(self, pipeline: Pipeline) -> None:
        """Before it is told that an engine has other tokens no prompt is called exact any more; `_adopt` may have to
        wait for its turn, and for a thread."""
        pipeline.differ(self._differing(pipeline, pipeline.reading.how if pipeline.reading is not None else None))

    def _differing(self, pipeline: Pipeline, how: str | None) -> dict[str, str]:
        """Why the tokens of these models are not the gateway's."""
        differing: dict[str, str] = {}
        proven = any(one.proven and one.pipeline is pipeline for one in self._engines.values())
        for id, engine in self._engines.items():
            engine.names = engine.names_now()
            # One that does not answer costs the others nothing, where these have shown what the model's chats are.
            why = (
                engine.differs
                or ("" if proven else engine.unproven)
                or (f"it has {engine.how}, others have {how}" if engine.how and engine.how != how else "")
            )
            if why and engine.pipeline is pipeline:
                differing |= dict.fromkeys(engine.names or ("",), f"replica {id} has another tokenizer: {why}")
        return differing
