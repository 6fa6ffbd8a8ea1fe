"""The gateway's tokenizer against the engines': each engine is asked for the ids of fixed texts when it is adopted.

What files a tokenizer is made of does not tell how an engine reads them (see `prompt.reading`), and flags like
`--tokenizer` are not to be seen from outside. So no tokenizer is believed to be the engine's because it has the same
name: the ids of some twenty texts have to be the same. An engine that reads the files in another known way is followed;
the prompts of a model whose engine makes other tokens are matched as text, and their ids are never sent to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp

from replicas import Replica

from .prompt.agreement import Answer
from .prompt.pipeline import Pipeline, Verdict

log = logging.getLogger("hitherto")

ANSWER_SECONDS = 10.0
AT_ONCE = 4  # questions to one engine, which may be busy with prompts
PAUSES = (1.0, 5.0, 30.0)  # seconds before an engine that did not answer is asked again


class Unanswered(Exception):
    """The engine does not tell what tokens it makes. `final`: asking again would not help."""

    def __init__(self, why: str, final: bool = False):
        super().__init__(why)
        self.final = final


async def engine_answers(session: aiohttp.ClientSession, url: str, model: str | None, texts: list[str]) -> list[Answer]:
    """What /tokenize says of each text, without and with special tokens. Raises Unanswered."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(text: str, special: bool) -> Answer:
        body: dict[str, Any] = {"prompt": text, "add_special_tokens": special}
        if model is not None:
            body["model"] = model
        async with gate, session.post(url + "/tokenize", json=body, timeout=aiohttp.ClientTimeout(ANSWER_SECONDS)) as response:
            if response.status != 200:
                raise Unanswered(f"/tokenize answers {response.status}", response.status < 500)
            ids = (await response.json(content_type=None)).get("tokens")
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise Unanswered("/tokenize tells no token ids", final=True)
        return Answer(text, special, ids)

    try:
        return await asyncio.gather(*(ask(text, special) for text in texts for special in (False, True)))
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError) as error:
        raise Unanswered(f"/tokenize does not answer: {error or type(error).__name__}") from None


@dataclass(frozen=True, slots=True)
class _Engine:
    """What was found of one engine."""

    incarnation: str
    names: tuple[str, ...]  # its models and adapters
    how: str
    differs: str


class TokenizerComparison:
    """Compares each engine once, and keeps the pipeline at what was found."""

    def __init__(self, pipeline: Callable[[], Pipeline], changed: Callable[[], None]):
        """`changed` is called after the pipeline makes other prompts than before."""
        self._pipeline, self._changed = pipeline, changed
        self._engines: dict[str, _Engine] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, tuple[str, Pipeline]] = {}
        self._adopting = asyncio.Lock()

    def compare(self, replica: Replica) -> None:
        """Once for each process behind an engine's address, and for each tokenizer of the gateway."""
        engine, now = replica.engine, (replica.incarnation, self._pipeline())
        if self._asked.get(engine) != now and now[1].tokenizer is not None:
            self.forget(engine)
            self._asked[engine] = now
            self._run(engine, self._compare(replica, engine, *now))

    def forget(self, engine: str) -> None:
        """It is gone, or another process has taken its place."""
        self._asked.pop(engine, None)
        if (task := self._running.pop(engine, None)) is not None:
            task.cancel()
        if self._engines.pop(engine, None) is not None:
            self._run("", self._adopt(self._pipeline()))

    def stop(self) -> None:
        for task in self._running.values():
            task.cancel()

    def _run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("comparing tokenizers failed", exc_info=error)

        self._running[name] = task = asyncio.create_task(work)
        task.add_done_callback(ended)

    async def _compare(self, replica: Replica, engine: str, incarnation: str, pipeline: Pipeline) -> None:
        try:
            answers = await self._answers(replica, pipeline.fixed_texts())
        except Unanswered as why:
            replica.tokenizer = f"cannot be compared: {why}"
            await self._adopt(pipeline)
            log.warning("replica %s: whether it makes the gateway's tokens cannot be compared: %s%s", engine, why,
                        f"; {inexact}, so its prompts are matched as text" if (inexact := pipeline.inexact()) else "")  # fmt: skip
            return
        verdict = await asyncio.get_running_loop().run_in_executor(None, pipeline.judge, answers)
        self._engines[engine] = _Engine(incarnation, tuple(replica.models), verdict.how, verdict.differs)
        replica.tokenizer = f"differs: {verdict.differs}" if verdict.differs else f"the gateway's, {verdict.how}"
        if verdict.differs:
            log.error("replica %s has another tokenizer than the gateway: %s. Prompts of its models are matched as text; "
                      "give the gateway the same --model. `hitherto doctor` compares them", engine, verdict.differs)  # fmt: skip
        else:
            log.info("replica %s makes the gateway's tokens of %d texts (%s)", engine, len(answers), verdict.how)
        await self._adopt(pipeline, verdict)

    async def _answers(self, replica: Replica, texts: list[str]) -> list[Answer]:
        model = next((name for name, parent in replica.models.items() if parent is None), None)
        async with aiohttp.ClientSession() as session:
            for pause in PAUSES:
                try:
                    return await engine_answers(session, replica.url, model, texts)
                except Unanswered as why:
                    if why.final:
                        raise
                await asyncio.sleep(pause)
            return await engine_answers(session, replica.url, model, texts)

    async def _adopt(self, pipeline: Pipeline, found: Verdict | None = None) -> None:
        """Read the files as the engines do that were compared; where they differ, as the first one does."""
        async with self._adopting:
            if pipeline is not self._pipeline():
                return
            how = next((one.how for one in self._engines.values() if not one.differs), None)
            differs = {}
            for id, one in self._engines.items():
                why = one.differs or (f"it has {one.how}, others have {how}" if one.how != how else "")
                differs |= dict.fromkeys(one.names or ("",), f"replica {id} has another tokenizer: {why}") if why else {}
            loop = asyncio.get_running_loop()
            if how is None:  # nobody has said; as engines of that version do
                verdict = await loop.run_in_executor(None, pipeline.likeliest)
            elif found is not None and found.how == how:
                verdict = found
            else:
                verdict = await loop.run_in_executor(None, pipeline.read_as, how)
            if pipeline is self._pipeline():
                pipeline.adopt(verdict, how is not None, differs)
                self._changed()
