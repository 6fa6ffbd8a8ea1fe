"""Compares the gateway's tokens with the engines': each engine is asked for its token ids of fixed texts and chats.

A tokenizer's files do not show how an engine reads them, and flags like `--tokenizer` cannot be seen from outside. An
equal name therefore proves nothing: the ids of some twenty texts, and of some fixed chats, have to be equal. If an
engine reads the files in another known way, the gateway does so too. If the engine makes other tokens, the prompts of
its models are matched as text, and the gateway's token ids are never sent to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import date
from itertools import count
from typing import Any

from replicas import Replica

from ..prompt import Prompt
from ..prompt.features import EFFORT, features_of
from ..prompt.pipeline import Pipeline
from ..prompt.reader import Verdict
from ..prompt.render.clock import ALL_ZONES, days_in, seconds_to_next_look, zones_left
from ..prompt.tokens.agreement import Answer, Differences
from ..prompt.tokens.folder import ModelError
from ..threads import FolderThreads, SlowFolder
from .chats import (
    NOTHING_SHOWN,
    EngineTokens,
    Made,
    NotAsked,
    chats_differ,
    days_printed,
    efforts_here,
    made_here,
    tokens_of,
    written,
)
from .doubts import Doubts

log = logging.getLogger("hitherto")

OTHERWISE = "; but it made a prompt otherwise: "
UP_TO_DATE = "; but its chats are exact only up to the date that they print: "
PAUSES = (1.0, 5.0, 30.0)  # seconds before an engine that did not answer is asked again


@dataclass(slots=True, eq=False)
class ComparedEngine:
    """What the comparison found out about the tokens of one engine process.

    `incarnation`: identifies the process. Until it has been compared, the findings of the process that ran before it at
    the same address are used.
    """

    incarnation: str
    pipeline: Pipeline  # the pipeline with which it is compared
    replicas: dict[str, Replica] = field(default_factory=dict)  # its ranks, by id
    found: str = "not compared yet"  # the result, in words
    said: str = ""  # `found`, and what was observed since
    how: str = ""  # how it reads the tokenizer's files; "" if not known
    differs: str = ""  # how its tokens of texts differ from the gateway's; "" if no difference is known
    unproven: str = ""  # why it does not report its tokens of texts, if that makes all of its prompts inexact
    chats: str = ""  # how its tokens of chats differ from the gateway's, or why nothing shows that they are equal
    unasked: bool = False  # whether it has answered none of the chats so far
    shown: bool = False  # whether its tokens of chats were shown to be the gateway's
    zones: frozenset[int] | None = None  # its possible time zones; None: it prints no date, or was not asked
    day: str = ""  # the message about its date
    efforts: str = ""  # how it writes a chat with a reasoning effort, if not as the gateway does
    doubts: Doubts = field(default_factory=Doubts)  # kinds of bodies of which it reported other token counts
    compared: bool = False
    names: frozenset[str] = frozenset()  # its models and adapters when the differences were last passed to the pipeline

    def tell(self, found: str | None = None) -> None:
        """Update the message about the tokenizer in the status of the engine's replicas.

        `found`: the result of a comparison of tokens, in words. None keeps the last result, where only what is known of
        the engine's date or of its token counts has changed.
        """
        if found is not None:
            self.found = found
        why = next(reversed(self.doubts.held.values()), "")
        self.said = self.found + self.day + (OTHERWISE + why if why else "")
        for replica in self.replicas.values():
            replica.tokenizer = self.said

    def names_now(self) -> frozenset[str]:
        return frozenset(name for replica in self.replicas.values() for name in replica.models)

    @property
    def differs_in_chats(self) -> bool:
        return bool(self.chats) and not self.unasked


class TokenizerComparison:
    """The comparison of each engine's tokens with those of one pipeline. The pipeline is given the results."""

    def __init__(
        self,
        pipeline: Callable[[], Pipeline],
        judged: Callable[[], None] = lambda: None,
        threads: FolderThreads | None = None,
        is_single: bool = False,
    ):
        """Create a comparison.

        `pipeline`: returns the pipeline in use now, which makes the gateway's tokens.
        `judged`: called after an engine was compared.
        `threads`: the threads that read the model's files.
        `is_single`: whether to ask each engine only once, even if it does not answer.
        """
        self._judged, self._threads = judged, threads or FolderThreads(1, 300.0)
        self._pipeline, self._pauses = pipeline, () if is_single else PAUSES
        self._engines: dict[str, ComparedEngine] = {}
        self._comparing: dict[str, asyncio.Task[None]] = {}  # by engine
        self._running: set[asyncio.Task[None]] = set()  # all tasks, those that only run `_adopt` included
        self._chats: tuple[object, list[Made]] = (None, [])  # a key, and the fixed chats with ids that were made for it
        # A lock: judging an engine's tokens and changing the pipeline's tokenizer (`_adopt`) exclude each other. Both
        # load tokenizers, and judging compares with the tokenizer in use.
        self._turn = asyncio.Lock()

    def compare(self, replica: Replica) -> None:
        """Start to compare the replica's engine in the background, unless that has been done.

        An engine is compared once for each process at its address and for each tokenizer of the gateway. Call this
        again when the replica's models change.
        """
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
        engine = self._engines[replica.engine] = ComparedEngine(replica.incarnation, pipeline, {replica.id: replica})
        engine.tell()
        self._stop_comparing(replica.engine)
        if old is not None and old.pipeline is pipeline and old.how:
            # Most likely the same engine was restarted: until it is compared, its files are read as before.
            engine.how, engine.differs, engine.chats, engine.shown = old.how, old.differs, old.chats, old.shown
            engine.zones = old.zones
            self._run(self._adopt(pipeline))
        self._comparing[replica.engine] = self._run(self._follow(replica, engine))

    async def compare_once(self, replica: Replica) -> ComparedEngine:
        """Compare the replica's engine now, and return the findings."""
        engine = ComparedEngine(replica.incarnation, self._pipeline(), {replica.id: replica})
        self._engines[replica.engine] = engine
        await self._compare(replica, engine)
        return engine

    def set_apart(self) -> set[str]:
        """Return the engines whose tokens differ from the gateway's, if another compared engine makes equal tokens.

        If none does, the result is empty, since the gateway may be the one that is wrong.
        """
        compared = {id: one for id, one in self._engines.items() if one.compared and one.pipeline is self._pipeline()}
        other = {id for id, one in compared.items() if one.differs or one.differs_in_chats or one.doubts.stands_alone}
        alike = {one.how for id, one in compared.items() if id not in other}
        in_use = reading.how if (reading := self._pipeline().reading) is not None else ""
        return other | {id for id, one in compared.items() if one.how != in_use} if in_use in alike else set()

    def made_otherwise(self, engine: str, prompt: Prompt, body: bytes, why: str) -> None:
        """Record that an engine's tokens of a prompt differ from the gateway's, in number or in their ids.

        `body`: the request's body, b"" if it is no longer in memory. `why`: the difference, in words.
        """
        if (found := self._maker_of(engine, prompt)) is None:
            return
        if (has := features_of(prompt, body)) is not None:
            for one in self._others(found):
                one.doubts.counted_elsewhere(has, False)
        if found.doubts.miscounted(has, prompt, why):
            self._differ(found.pipeline)
            found.tell()

    def made_alike(self, engine: str, prompt: Prompt) -> None:
        """Record that an engine and the gateway counted equally many tokens in a prompt of a doubted kind.

        `Doubts` has the kinds of bodies in which the counts have differed.
        """
        if (found := self._maker_of(engine, prompt)) is None or (has := features_of(prompt, b"")) is None:
            return
        if found.doubts.counted_alike(has):
            self._differ(found.pipeline)
            found.tell()
        others = self._others(found)
        for one in others:
            one.doubts.counted_elsewhere(has, True)
        if any(one.doubts.stands_alone for one in others):
            self._judged()

    def _maker_of(self, engine: str, prompt: Prompt) -> ComparedEngine | None:
        """Return what is known of an engine's tokens, or None if it does not apply to this prompt.

        It applies only while the gateway uses the pipeline with which the engine was compared, and makes tokens in the
        same way as it did for this prompt.
        """
        found, pipeline = self._engines.get(engine), self._pipeline()
        return found if found and found.pipeline is pipeline and prompt.made_by == pipeline.made_by else None

    def _others(self, engine: ComparedEngine) -> list[ComparedEngine]:
        return [one for one in self._engines.values() if one is not engine and one.pipeline is engine.pipeline]

    def forget(self, engine: str) -> None:
        """Drop the findings about an engine that is gone."""
        self._stop_comparing(engine)
        if (gone := self._engines.pop(engine, None)) is not None and (gone.how or gone.zones):
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

    def _is_stale(self, engine: ComparedEngine) -> bool:
        """Return whether an engine was compared with a tokenizer that the gateway no longer uses."""
        return engine.pipeline is not self._pipeline()

    async def _follow(self, replica: Replica, engine: ComparedEngine) -> None:
        """Compare the engine once; if its chats print the date, ask for the date again at each quarter of an hour.

        Time zones differ by multiples of a quarter of an hour, so a new day may begin at each of these times.
        """
        await self._compare(replica, engine)
        pipeline, answers = engine.pipeline, True
        while pipeline.prints_date and engine.compared and not (engine.differs or engine.chats) and engine.zones:
            pause = seconds_to_next_look(pipeline.clock.now())
            await asyncio.sleep(pause if answers else min(pause, PAUSES[-1]))
            if self._is_stale(engine):
                return
            try:
                async with tokens_of(replica) as asked:
                    await self._look_at_date(asked, engine, engine.zones)
                answers = True
            except NotAsked:
                answers = False  # its time zones stay as they were, and allow more than one day as time passes
            self._differ(pipeline)

    async def _compare(self, replica: Replica, engine: ComparedEngine) -> None:
        id, pipeline = replica.engine, engine.pipeline
        try:
            answers = await self._answers(replica, pipeline.fixed_texts())
        except NotAsked as why:
            if self._is_stale(engine):
                return
            engine.how = engine.differs = engine.chats = ""
            engine.shown, engine.zones = False, ALL_ZONES if pipeline.prints_date else None
            if pipeline.must_be_shown:
                engine.unproven = f"nothing shows what tokens it makes: {why}"
            self._differ(pipeline)
            engine.tell(f"cannot be compared: {why}")
            await self._adopt(pipeline)
            doubt = f"; {inexact}, so its prompts are matched as text" if (inexact := pipeline.inexact()) else ""
            return log.warning(
                "replica %s: whether it makes the gateway's tokens cannot be compared: %s%s", id, why, doubt
            )
        try:
            async with self._turn:
                verdict = await self._in_thread(pipeline, pipeline.judge, answers)
        except (ModelError, SlowFolder) as error:
            if not self._is_stale(engine):
                engine.tell(f"cannot be compared: {error}")
            return log.error("replica %s: its tokens cannot be compared: %s", id, error)
        if self._is_stale(engine):
            return
        engine.how, engine.differs, engine.compared = verdict.how, verdict.differs, True
        if verdict.differs:
            self._differ(pipeline)
            engine.tell(f"differs: {verdict.differs}")
            log.error("replica %s has another tokenizer than the gateway: %s. Prompts of its models are matched as text; "
                      "give the gateway the same --model. `hitherto doctor` compares them", id, verdict.differs)  # fmt: skip
        else:
            engine.tell(f"the gateway's, {verdict.how}")
            log.info("replica %s: same token ids as the gateway for %d texts (%s)", id, len(answers), verdict.how)
        await self._adopt(pipeline, verdict)
        self._judged()  # already now, since an engine may take long to answer chats
        if not verdict.differs:
            await self._compare_chats(replica, engine)
            self._judged()

    async def _compare_chats(self, replica: Replica, engine: ComparedEngine) -> None:
        """Compare the engine's tokens of the fixed chats, and try again while the engine cannot be asked.

        For some engine versions, the gateway knows how they render chats. The comparison then only finds out whether
        flags change that, and gives up after some seconds. For other versions it goes on until the engine answers, and
        after some seconds the engine's chats are matched as text.
        """
        said, pipeline, pauses = engine.found, engine.pipeline, self._pauses
        for asked in count(1):
            if self._is_stale(engine) or not pipeline.renderers:
                return
            try:
                differs, efforts = await self._differing_chats(replica, engine)
                break
            except NotAsked as error:
                why = f"its chats cannot be compared yet: {error}"
            if self._is_stale(engine):
                return
            if asked > len(pauses):
                if pipeline.prints_date and engine.zones is None:
                    engine.zones = ALL_ZONES
                if not pipeline.must_be_shown:
                    self._differ(pipeline)
                    return engine.tell(f"{said}; {why}")
                first, engine.chats, engine.unasked = not engine.chats, why, True
                self._differ(pipeline)
                engine.tell(why)
                if not pauses:
                    return
                if first:
                    log.warning("replica %s: %s. Chats of its models are matched as text until it answers", replica.engine, why)  # fmt: skip
                    await self._adopt(pipeline)
                    self._judged()
            await asyncio.sleep(pauses[min(asked, len(pauses)) - 1])
        if self._is_stale(engine):
            return
        if differs == NOTHING_SHOWN and not pipeline.must_be_shown:
            return self._differ(pipeline)  # it takes no chats
        engine.shown, engine.chats, engine.unasked, engine.efforts = not differs, differs, False, efforts
        self._differ(pipeline)
        engine.tell(f"differs: {differs}" if differs else f"{said}; fills its chat template alike")
        if differs:
            log.error("replica %s: %s. Chats of its models are matched as text; give the gateway the --chat-template that it "
                      "was started with. `hitherto doctor` compares them", replica.engine, differs)  # fmt: skip
        if efforts:
            log.warning(
                "replica %s: with an effort to reason %s. Such bodies are matched as text", replica.engine, efforts
            )
        await self._adopt(pipeline)

    async def _differing_chats(self, replica: Replica, engine: ComparedEngine) -> tuple[str, str]:
        """Return two texts: how the engine's tokens of plain chats differ, and those of chats with a reasoning effort.

        Each is "" if no difference is known. Raises NotAsked if the engine does not report its tokens of plain chats.
        If it does not report those of chats with an effort, the second text is "": the token counts in its real answers
        show a difference later.
        """
        pipeline, day = engine.pipeline, None
        async with tokens_of(replica) as asked:
            while True:
                day, before = await self._look_at_date(asked, engine, ALL_ZONES), day
                differs = await chats_differ(asked, self._chats_of(pipeline, day))
                if not differs or day == before:  # otherwise its day may have ended between the questions
                    break
            efforts = ""
            if not differs:
                with contextlib.suppress(NotAsked):
                    efforts = await chats_differ(asked, efforts_here(pipeline, day))
        return differs, "" if efforts == NOTHING_SHOWN else efforts

    async def _look_at_date(self, asked: EngineTokens, engine: ComparedEngine, zones: frozenset[int]) -> date | None:
        """Ask the engine for its tokens of one chat, and return the date that it prints there.

        If several dates are possible, the earliest is returned; if the tokens match no date, today. If the model's
        chats print no date, None is returned without asking. `zones`: the time zones in which the engine may be.
        `engine.zones` is set to those of them that fit the date. Raises NotAsked.
        """
        pipeline = engine.pipeline
        if not pipeline.prints_date:
            return None
        since = pipeline.clock.now()
        printed = await days_printed(asked, pipeline)
        engine.zones = zones_left(zones, printed, since, pipeline.clock.now())
        return min(printed, default=date.fromtimestamp(since))

    def _chats_of(self, pipeline: Pipeline, day: date | None) -> list[Made]:
        """Return the fixed chats with the gateway's token ids, for engines that print the date `day` in chats.

        The result is cached until the day, or the gateway's way of making ids, changes.
        """
        key = pipeline.made_by, day
        if self._chats[0] != key:
            self._chats = key, [*made_here(pipeline, day)]
        return self._chats[1]

    async def _answers(self, replica: Replica, texts: list[str]) -> list[Answer]:
        async with tokens_of(replica) as asked:
            for pause in self._pauses:
                try:
                    return await asked.of_texts(texts)
                except NotAsked as why:
                    if why.final:
                        raise
                await asyncio.sleep(pause)
            return await asked.of_texts(texts)

    async def _in_thread(self, pipeline: Pipeline, function: Callable[..., Verdict], *args: Any) -> Verdict:
        return await self._threads.run(pipeline.directory, "", function, *args)

    async def _adopt(self, pipeline: Pipeline, found: Verdict | None = None) -> None:
        """Have the gateway read the tokenizer's files in the way in which the compared engines read them.

        If engines differ, the way of the first of them is used. If no engine's way is known, it is the most likely one
        for engines of this version. `found`: the verdict on an engine that was just compared, which may have the
        tokenizer loaded already.
        """
        async with self._turn:
            if pipeline is not self._pipeline():
                return
            known = [one for one in self._engines.values() if one.pipeline is pipeline and one.how and not one.differs]
            how = next((one.how for one in sorted(known, key=lambda one: not one.compared)), None)
            if how is None:  # unknown: read them as engines of that version do
                verdict = await self._in_thread(pipeline, pipeline.likeliest)
            elif found is not None and found.how == how and found.loaded is not None:
                verdict = found
            else:  # loads nothing if the files are read this way already
                verdict = await self._in_thread(pipeline, pipeline.read_as, how)
            if pipeline is self._pipeline():
                pipeline.adopt(verdict, any(one.compared for one in known), self._differing(pipeline, how))

    def _differ(self, pipeline: Pipeline) -> None:
        """Pass the known differences to the pipeline at once, so that no affected prompt counts as exact any more.

        `_adopt` passes them too, but may have to wait for a lock and a thread first.
        """
        pipeline.differ(self._differing(pipeline, pipeline.reading.how if pipeline.reading is not None else None))

    def _differing(self, pipeline: Pipeline, how: str | None) -> Differences:
        """Return for which models, chats and kinds of bodies the engines' tokens are not the gateway's, and why.

        `how`: the way in which the gateway reads the tokenizer's files, in words; None if they are not read yet.
        """
        texts: dict[str, str] = {}
        chats: dict[str, str] = {}
        bodies: dict[frozenset[str], str] = {}
        here = {id: one for id, one in self._engines.items() if one.pipeline is pipeline}
        shown = any(one.shown for one in here.values())
        for id, engine in here.items():
            engine.names = engine.names_now()
            names = engine.names or ("",)
            # An engine that does not answer is no reason for doubt once another engine has shown the model's chats.
            why = engine.differs or ("" if shown else engine.unproven)
            if not why and engine.how and engine.how != how:
                why = f"it has {engine.how}, others have {how}"
            if why:
                texts |= dict.fromkeys(names, f"replica {id} has another tokenizer: {why}")
            if engine.chats and not (shown and engine.unasked):
                chats |= dict.fromkeys(names, f"replica {id} writes chats in another way: {engine.chats}")
            kinds = engine.doubts.held | ({frozenset((EFFORT,)): engine.efforts} if engine.efforts else {})
            bodies |= {body: f"replica {id} made such a body otherwise: {why}" for body, why in kinds.items()}
        doubted = {known for one in here.values() for known in one.doubts.kinds}
        return Differences(texts, chats, bodies, doubted, shown, *self._dates(here, pipeline.clock.now()))

    def _dates(self, engines: dict[str, ComparedEngine], now: float) -> tuple[frozenset[int] | None, str]:
        """Return the time zones in which these engines may be, and why the date in their chats is uncertain.

        The zones are None if no engine prints a date; the reason is "" if the date is certain. Also updates each
        engine's message about its date. `now`: seconds since 1970.
        """
        zones = {
            id: one.zones for id, one in engines.items() if one.zones and not (one.differs or one.differs_in_chats)
        }
        days = {id: days_in(its, now) for id, its in zones.items() if its != ALL_ZONES}
        printed = {its[0]: id for id, its in reversed(days.items()) if len(its) == 1}
        here, why = date.fromtimestamp(now), ""
        if untold := next((id for id in zones if id not in days), None):
            why = f"nothing tells which day replica {untold} prints"
        elif len(printed) > 1:
            said = ", ".join(f"replica {id} prints {written(day)}" for day, id in sorted(printed.items()))
            why = f"{said}: their time zones (TZ) differ"
        for id, engine in engines.items():
            of_it, before = days.get(id, ()), engine.day
            if id in zones and why:
                engine.day = UP_TO_DATE + why
            elif len(of_it) < 2:  # with two possible days it may be changing just now
                engine.day = ""
                if of_it and of_it[0] != here:
                    elsewhere = f"its time zone (TZ) is another than this gateway's, where it is {written(here)}"
                    engine.day = f"; it prints {written(of_it[0])}, {elsewhere}"
            if engine.day != before:
                engine.tell()
                if engine.day:
                    log.log(logging.WARNING if why else logging.INFO, "replica %s%s", id, engine.day)
        return frozenset().union(*zones.values()) if zones else None, why
