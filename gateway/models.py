"""Models: what each served model needs for its prompts to be exact, and which replicas are of which model.

A `ModelSpace` is one way of making prompts: a tokenizer, a chat template, a block size, and the quirks of the engine's
version. All replicas whose engines work alike are of one space. Replicas that serve the same name but differ in any of
this (a rolling upgrade to another block size, a tokenizer that was changed on disk between two starts) are variants of
the model with a space each: a request is prepared once for each variant that is present, for two at most. Everything is
found from what engines tell, whenever they tell it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from policies import CostGroup
from replicas import TAKES_TRAFFIC, Replica

from .config import Settings
from .model_files import DEFAULT_BLOCK_SIZE, ModelFiles, Source, base_names
from .ops.comparison import TokenizerComparison
from .prompt import Prompt
from .prompt.api.openai import parse
from .prompt.offload import TakesLong, event_loop
from .prompt.pipeline import PREFIX_BYTES, Pipeline
from .prompt.quirks import VersionQuirks

log = logging.getLogger("hitherto")

MOST_VARIANTS = 2  # that a request is prepared for; replicas of a third are chosen by load


class Kind(NamedTuple):
    """What makes prompts differ. `source` None: no files are known here, so prompts are matched as text."""

    source: Source | None
    block_size: int
    quirks: VersionQuirks

    def differences(self, other: Kind) -> str:
        """In words, what sets this variant apart."""
        told = []
        if self.block_size != other.block_size:
            told.append(f"blocks of {self.block_size} tokens instead of {other.block_size}")
        if self.source != other.source:
            mine, its = (one.source.directory if one.source else "no files here" for one in (self, other))
            told.append(
                f"another tokenizer or chat template ({mine} instead of {its})"
                if mine != its
                else f"the files in {mine} as they are now"
            )
        if self.quirks != other.quirks:
            told.append("a version of the engine that makes prompts in another way")
        return ", ".join(told)


@dataclass(eq=False, slots=True)
class Member:
    """A replica, and what was found of the incarnation that it had when it was adopted last."""

    replica: Replica
    incarnation: str | None = None  # before the first
    space: ModelSpace | None = None
    served: frozenset[str] = frozenset()  # the names that it told last, also while it is away
    # What it was started from, which does not change with what is on the disk later. Until that is found, what the
    # incarnation before it was started from, or what was found last for its model.
    source: Source | None = None
    finding: asyncio.Task[None] | None = None
    context: int | None = None  # the longest prompt in tokens
    # its engine makes other tokens of the same files than others do, so its prompts are matched as text
    set_apart: bool = False


class ModelSpace:
    """A model, or one variant of it: how its prompts are made, and the replicas that take them so."""

    def __init__(
        self, number: int, kind: Kind, pipeline: Pipeline, costs: CostGroup, judged: Callable[[ModelSpace], None]
    ):
        self.number, self.kind, self.costs = number, kind, costs
        self.names: set[str] = set()  # under which its replicas serve the base model
        self.members: dict[str, Member] = {}
        self.loading: asyncio.Task[None] | None = None
        self.use(pipeline)
        self.comparison = TokenizerComparison(lambda: self.pipeline, lambda: judged(self))

    @property
    def name(self) -> str:
        return min(self.names, default="the model")

    @property
    def context(self) -> int | None:
        """The longest context of its replicas in tokens."""
        return max((one.context or 0 for one in self.members.values()), default=0) or None

    def use(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        pipeline.space, pipeline.block_size = self.number, self.kind.block_size

    def follow(self, kind: Kind) -> None:
        """Make prompts in this way from now on, with the same files."""
        self.kind = kind
        self.pipeline.block_size = kind.block_size


class Models:
    """The spaces of all models. Replicas are adopted into them, and requests prepared by them."""

    def __init__(self, settings: Settings, directory: Path | None, name: str, costs: CostGroup | None = None):
        """`directory`: of the model that the operator names, None if none is; `name`: what launched engines serve it
        by."""
        self._settings = settings
        self._files = ModelFiles(settings, directory, name)
        self._files.mistaken = self._find_again
        self._numbers = count()
        self._costs = costs or CostGroup()
        self.members: dict[str, Member] = {}
        # Called when a replica is of another space or its space has changed, and when something changed that nobody
        # else knows of.
        self.moved: Callable[[Replica, ModelSpace], None] = lambda replica, space: None
        self.on_change: Callable[[], None] = lambda: None
        first = self._files.new_pipeline(directory)
        kind = Kind(self._files.given, first.block_size, VersionQuirks())
        self.spaces = [ModelSpace(next(self._numbers), kind, first, self._costs, self._judged)]
        self._said: frozenset[Kind] = frozenset()
        self.refresh()

    @classmethod
    def of(cls, pipeline: Pipeline) -> Models:
        """One model, whose prompts this pipeline makes, whatever its replicas tell."""
        made = cls(Settings(), None, "model")
        (space,) = made.spaces
        space.kind = space.kind._replace(block_size=pipeline.block_size)
        space.use(pipeline)
        made.refresh, made.made_by = lambda: None, lambda replica: pipeline.made_by
        return made

    # --- what requests ask

    def prepare(self, path: str, body: bytes, headers: Mapping[str, str] | None, adapters: Collection[str]) -> Prompt:
        """One request -> Prompt, as its model has it; may run in a thread. Raises ApiError and TakesLong, as
        `Pipeline.prepare`."""
        one = self._one
        if one is not None:
            return one.pipeline.prepare(path, body, headers, adapters)
        request, unusual = parse(body, self._context)
        model = request.get("model")
        if self._is_nobodys(model):  # whose files and context would be another model's
            stream = request.get("stream") is True
            return Prompt(path, model, stream=stream, mode="load", note="no replica is known to serve its model")
        first, *others = self.routes(model)
        prompt = first.pipeline.prepare_parsed(path, body, request, unusual, headers, adapters)
        for other in others:
            if event_loop.holds and perf_counter() > event_loop.until:
                raise TakesLong
            prompt.also = other.pipeline.prepare_parsed(path, body, request, unusual, headers, adapters)
        return prompt

    def routes(self, model: object) -> tuple[ModelSpace, ...]:
        """The variants that a request for this model is prepared for, the most common one first."""
        routes = self._routes
        return (routes.get(model) if type(model) is str else None) or routes.get("") or routes[None]

    def _is_nobodys(self, model: object) -> bool:
        """Whether replicas have told what they serve, and none of them this name."""
        routes = self._routes
        return type(model) is str and model != "" and model not in routes and "" not in routes and len(routes) > 1

    @property
    def pipelines(self) -> list[Pipeline]:
        return [space.pipeline for space in self.spaces]

    def block_size(self, replica: str) -> int:
        """Tokens in a block of this replica, which has been adopted."""
        return self.members[replica].space.kind.block_size

    def made_by(self, replica: str) -> int:
        """The number of the way in which ids are made for this replica, see `Pipeline.made_by`."""
        return self.members[replica].space.pipeline.made_by

    def differ_in_context(self, model: str | None) -> bool:
        """Whether the replicas that serve this name have contexts of several lengths."""
        return self._mixed and len(self.contexts.get(model) or self.contexts[None]) > 1

    def has_room(self, replica: str, tokens: int) -> bool:
        """Whether so many tokens fit its context, as far as is known."""
        member = self.members.get(replica)
        return member is None or not member.context or tokens <= member.context

    # --- replicas come, change and go

    def adopt(self, replica: Replica) -> ModelSpace:
        """The space of a replica that is ready, by what its engine tells now."""
        member = self.members.get(replica.id)
        if member is not None and member.replica is not replica:
            self._drop(member)
            member = None
        if member is None:
            member = self.members[replica.id] = Member(replica)
        if member.incarnation != replica.incarnation:
            member.incarnation, member.context, member.set_apart = replica.incarnation, None, False
            if not member.served & replica.models.keys():  # else it most likely has the files that it had before
                member.source = self._files.known(replica)
            self._find_files(member)
        elif member.source is None and member.finding is None:
            self._find_files(member)
        member.context = replica.max_model_len or member.context
        member.served = frozenset(replica.models) or member.served
        kind, names = self._kind(member), base_names(replica)
        space = member.space
        if space is None or space.kind != kind or (space.names and names and not space.names & names):
            space = self._space_for(member, kind, names)
        space.names |= names
        if replica.version:
            space.pipeline.follow(replica.version_quirks, at_once=False)
        space.comparison.compare(replica)
        return space

    def forget(self, replica: Replica) -> None:
        """The replica is gone."""
        member = self.members.get(replica.id)
        if member is not None and member.replica is replica:
            self._drop(member)
            self._drop_empty()

    def stop(self) -> None:
        self._files.stop()
        for task in [*(one.finding for one in self.members.values()), *(one.loading for one in self.spaces)]:
            if task is not None:
                task.cancel()
        for space in self.spaces:
            space.comparison.stop()

    def _judged(self, space: ModelSpace) -> None:
        """Engines that make other tokens than the rest of their space are a variant of their own: the rest stays
        exact."""
        engines = space.comparison.set_apart()
        moving = [one for one in space.members.values() if one.replica.engine in engines]
        for member in moving:
            member.set_apart = True
        for member in moving:
            self.adopt(member.replica)
        if moving:
            self.on_change()

    def _kind(self, member: Member) -> Kind:
        replica, space = member.replica, member.space
        size = (
            self._settings.block_size or replica.block_size or (space.kind.block_size if space else DEFAULT_BLOCK_SIZE)
        )
        return Kind(
            None if member.set_apart else member.source,
            size,
            VersionQuirks.of(replica.version_quirks) if replica.version or space is None else space.kind.quirks,
        )

    def _space_for(self, member: Member, kind: Kind, names: set[str]) -> ModelSpace:
        """An existing space of that kind, or its own or an empty one made to be, or a new one."""
        old = member.space
        space = next(
            (
                one
                for one in self.spaces
                if one.kind == kind and one.members and (one.names & names or not (one.names and names))
            ),
            None,
        )
        if space is None:
            free = [one for one in self.spaces if not one.members or (one is old and _has_no_other(one, member))]
            space = next((one for one in free if one.kind.source == kind.source or one is old), None)
            if space is not None:
                self._retune(space, kind)
            else:
                space = self._new_space(kind, names)
            self._share_costs(space, names)
        if space is not old:
            self._leave(member)
        space.members[member.replica.id], member.space = member, space
        space.names |= names
        if space.loading is not None:
            member.replica.tokenizer = "not compared yet"
        self._drop_empty()
        self._say(space)
        self.moved(member.replica, space)
        return space

    def _retune(self, space: ModelSpace, kind: Kind) -> None:
        """Nobody is of this space as it was, so it may become another kind."""
        old = space.kind
        space.follow(kind)
        if old.source != kind.source:
            space.use(self._files.new_pipeline(None))
            self._load(space)

    def _new_space(self, kind: Kind, names: set[str]) -> ModelSpace:
        space = ModelSpace(next(self._numbers), kind, self._files.new_pipeline(None), CostGroup(), self._judged)
        space.names = set(names)
        self.spaces.append(space)
        self._load(space)
        return space

    def _share_costs(self, space: ModelSpace, names: set[str]) -> None:
        """Variants of a model have one group of costs; the first model goes on with what was learned before."""
        relative = next((one for one in self.spaces if one is not space and one.names & names), None)
        if relative is not None:
            space.costs = relative.costs
        elif space.names and not space.names & names:
            space.costs = CostGroup()
        space.names = set(names)

    def _drop(self, member: Member) -> None:
        del self.members[member.replica.id]
        if member.finding is not None:
            member.finding.cancel()
        self._leave(member)

    def _leave(self, member: Member) -> None:
        space, member.space = member.space, None
        if space is None or space.members.get(member.replica.id) is not member:
            return
        del space.members[member.replica.id]
        if not any(one.replica.engine == member.replica.engine for one in space.members.values()):
            space.comparison.forget(member.replica.engine)

    def _drop_empty(self) -> None:
        """Keep one space without replicas, if there is no other: what is known of the model serves those that come
        back."""
        for space in [one for one in self.spaces if not one.members]:
            if len(self.spaces) > 1:
                self.spaces.remove(space)
                space.comparison.stop()
                if space.loading is not None:
                    space.loading.cancel()

    def _say(self, space: ModelSpace) -> None:
        """The variants of a model, when they change."""
        variants = [one for one in self.spaces if one.members and one.names & space.names]
        kinds = frozenset(one.kind for one in variants)
        if len(variants) < 2 or kinds == self._said:
            return
        self._said = kinds
        first, *others = variants
        for other in others:
            log.warning(
                "model %s: replicas %s are a variant: %s",
                space.name,
                ", ".join(other.members),
                other.kind.differences(first.kind),
            )
        log.warning("model %s: prompts are prepared for %d variants%s", space.name, min(len(variants), MOST_VARIANTS),
                    "; replicas of a third are chosen by load alone" if len(variants) > MOST_VARIANTS else "")  # fmt: skip

    # --- files are found, and pipelines loaded

    def _find_files(self, member: Member) -> None:
        if member.finding is not None:
            member.finding.cancel()
        member.finding = asyncio.create_task(self._found(member, member.incarnation))

    async def _found(self, member: Member, incarnation: str) -> None:
        try:
            source = await self._files.find(member.replica)
        except Exception:
            log.exception("looking for the files of replica %s failed", member.replica.id)
            source = None
        member.finding = None
        if source != member.source and incarnation == member.replica.incarnation:
            member.source = source
            self.adopt(member.replica)
            self.on_change()

    def _find_again(self, names: set[str]) -> None:
        """Replicas of this model were taken for those that the operator gave the files of."""
        for member in [one for one in self.members.values() if base_names(one.replica) & names]:
            member.source = None
            self._find_files(member)
            self.adopt(member.replica)
        self.on_change()

    @property
    def waiting_for(self) -> str | None:
        """What the gateway has no tokenizer for yet, as long as it has none for any model."""
        busy = [one.name for one in self.spaces if one.loading is not None]
        busy += [
            min(base_names(one.replica), default="the model")
            for one in self.members.values()
            if one.finding is not None and one.source is None
        ]
        ready = any(space.members and space.kind.source is not None and space.loading is None for space in self.spaces)
        return f"the tokenizer of {busy[0]}, which is being loaded" if busy and not ready else None

    def _load(self, space: ModelSpace) -> None:
        if space.loading is not None:
            space.loading.cancel()
            space.loading = None
        if space.kind.source is not None:
            space.loading = asyncio.create_task(self._loaded(space, space.kind.source))

    async def _loaded(self, space: ModelSpace, source: Source) -> None:
        pipeline = await self._files.load(source, space.name if space.names else None)
        if pipeline is not None:
            space.use(pipeline)
            told = next((one.replica.version_quirks for one in space.members.values() if one.replica.version), {})
            pipeline.follow(told, at_once=False)
            for member in space.members.values():
                space.comparison.compare(member.replica)
        space.loading = None
        self.on_change()

    # --- what follows from all of it

    def refresh(self) -> None:
        """Replicas' states, models or spaces have changed."""
        taking = [one for one in self.members.values() if one.replica.state in TAKES_TRAFFIC and one.space is not None]
        counts = Counter((name, one.space) for one in taking for name in (None, *(one.replica.models or ("",))))
        routes: dict[str | None, list[ModelSpace]] = {None: []}
        for (name, space), _ in sorted(counts.items(), key=lambda item: (-item[1], item[0][1].number)):
            routes.setdefault(name, []).append(space)
        present = set(taking)
        away = [one for one in self.members.values() if one not in present and one.space is not None]
        _add_away(routes, away)
        self._routes = {name: (*found[:MOST_VARIANTS],) for name, found in routes.items()}
        if not self._routes[None]:
            self._routes[None] = (self.spaces[0],)
        served = {frozenset(one.replica.models) for one in taking} | {one.served for one in away}
        self.several = len(served) > 1
        self._bound_contexts(routes)
        with_files = [one for one in self.spaces if one.kind.source is not None]
        for space in with_files:
            space.pipeline.bound_prefixes(PREFIX_BYTES // len(with_files))
        spaces = {space for found in self._routes.values() for space in found}
        self._one = spaces.pop() if len(spaces) == 1 else None

    def _bound_contexts(self, routes: Mapping[str | None, Iterable[ModelSpace]]) -> None:
        """A replica's context counts while it is away: what fits it alone has to wait for it."""
        self.contexts: dict[str | None, tuple[int, ...]] = {}
        for name, spaces in routes.items():
            names = {one for space in spaces for one in space.names}
            related = [space for space in self.spaces if space in spaces or space.names & names]
            self.contexts[name] = (
                *sorted({one.context for space in related for one in space.members.values() if one.context}),
            )
        self._mixed = len(self.contexts[None]) > 1
        for space in self.spaces:
            related = [one for one in self.spaces if one is space or one.names & space.names]
            longest = max((one.context or 0 for one in related), default=0) or None
            if longest != space.pipeline.max_model_len:
                space.pipeline.max_model_len = longest
        self._context = max((space.context or 0 for space in self.spaces), default=0) or 1_000_000

    def describe(self) -> list[dict[str, Any]]:
        """For people: each model's own, and its variants."""
        return [
            {
                "models": sorted(space.names),
                "replicas": list(space.members),
                "directory": str(space.kind.source.directory) if space.kind.source else None,
                "block_size": space.kind.block_size,
                "max_model_len": space.context,
                "versions": sorted({one.replica.version for one in space.members.values() if one.replica.version}),
                "variants": sum(bool(one.names & space.names) for one in self.spaces if one.members),
            }
            for space in self.spaces
            if space.members
        ]


def _add_away(routes: dict[str | None, list[ModelSpace]], away: Iterable[Member]) -> None:
    """Names that only replicas which take no traffic now have served: what is asked of these has to wait for them, and
    is judged by their model's files and context meanwhile, not by another's."""
    if "" in routes:
        return  # a replica that tells no names takes requests for any
    waiting: dict[str | None, list[ModelSpace]] = {}
    for member in away:
        for name in member.served - routes.keys():
            spaces = waiting.setdefault(name, [])
            if member.space is not None and member.space not in spaces:
                spaces.append(member.space)
    routes.update(waiting)


def _has_no_other(space: ModelSpace, member: Member) -> bool:
    """Whether all replicas of a space are this engine's, or of engines that have restarted since."""
    engine = member.replica.engine
    return all(
        one.replica.engine == engine or one.incarnation != one.replica.incarnation for one in space.members.values()
    )
