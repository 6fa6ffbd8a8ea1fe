"""Models: which replicas serve which model, and the files with which each model's prompts are made.

Engines report both, at any time. A *space* is one format of prompts: a tokenizer, a template and a block size. A model
whose replicas differ in their format has several spaces, its *variants*. Requests find the spaces of their model in
`Routes`, which are built again when replicas change. A request is prepared once for each variant of its model that has
replicas, for two variants at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path

from policies import CostGroup
from policies.transfers import Bytes
from replicas import TAKES_TRAFFIC, Replica
from replicas.served import base_names

from . import model_files
from .model_files import DEFAULT_BLOCK_SIZE, ModelFiles, Source
from .prompt import Prompt
from .prompt.pipeline import Pipeline
from .prompt.quirks import VersionQuirks
from .prompt.reader import PREFIX_BYTES
from .routes import MOST_VARIANTS, Routes
from .settings import ConfigError, Settings
from .spaces import Member, ModelSpace, PromptFormat

log = logging.getLogger("hitherto")


class Models:
    """The spaces (formats of prompts) of all models, and the replicas in each.

    `routes`: the present mapping from a request's model name to the model's spaces.
    """

    def __init__(self, settings: Settings, directory: Path | None, name: str, costs: CostGroup | None = None):
        """Make the space (format of prompts) of the model that the operator names.

        `directory`: the folder of that model, None if the operator names none. `name`: the name by which launched
        engines serve it. `costs`: the learned costs of tokens that this first space starts with.
        """
        self._settings = settings
        self._files = ModelFiles(settings, directory, name)
        self._files.mistaken = self._find_again
        self._numbers = count()
        self.members: dict[str, Member] = {}
        # `moved` is called when a replica joins another space, or when the format of its space has changed. `on_change`
        # is called after changes that this class makes by itself, not on a caller's behalf.
        self.moved: Callable[[Replica, ModelSpace], None] = lambda replica, space: None
        self.on_change: Callable[[], None] = lambda: None
        first = self._files.new_pipeline(directory)
        format = PromptFormat(self._files.given, first.block_size, VersionQuirks())
        self.spaces = [
            ModelSpace(next(self._numbers), format, first, costs or CostGroup(), self._judged, self._files.loading)
        ]
        self._said: dict[str, frozenset[PromptFormat]] = {}  # the variants logged last, by model
        self.refresh()

    @classmethod
    def of(cls, pipeline: Pipeline) -> Models:
        """Make the models of a gateway with one model, whose prompts all come from this pipeline."""
        made = cls(Settings(), None, "model")
        (space,) = made.spaces
        space.format = space.format._replace(block_size=pipeline.block_size)
        space.use(pipeline)
        made.refresh, made.made_by = lambda: None, lambda replica: pipeline.made_by
        return made

    # --- what is asked of the models

    def refresh(self) -> None:
        """Build the routes again and update limits of the pipelines; called after replicas or spaces have changed.

        Each pipeline gets its share of the memory for tokens of known prefixes (PREFIX_BYTES), and the longest context
        of its model's replicas, which bounds its prompts.
        """
        self.routes = Routes(self.spaces, self.members.values())
        with_files = [one for one in self.spaces if one.format.source is not None]
        for space in with_files:
            space.pipeline.bound_prefixes(PREFIX_BYTES // len(with_files))
        for space in self.spaces:
            related = [one for one in self.spaces if one is space or one.names & space.names]
            longest = max((one.context or 0 for one in related), default=0) or None
            if longest != space.pipeline.max_model_len:
                space.pipeline.max_model_len = longest

    @property
    def pipelines(self) -> list[Pipeline]:
        return [space.pipeline for space in self.spaces]

    def blocks(self, replica: str) -> tuple[int, int]:
        """Return a replica's block size in tokens, and the number of tokens after a block that its hash includes."""
        return self.members[replica].space.format.blocks

    def prompt_bytes(self, replica: str) -> Bytes | None:
        """Return a function from a number of prompt tokens to the size in bytes of their KV cache at this replica.

        Returns None if the size is not known, or the replica has no space (format of prompts) yet.
        """
        member = self.members.get(replica)
        return member.space.prompt_bytes if member is not None and member.space is not None else None

    def made_by(self, replica: str) -> int:
        """Return a number that stands for the way in which token ids for this replica are made (`Pipeline.made_by`).

        It changes whenever the same prompt may get other ids than before.
        """
        return self.members[replica].space.pipeline.made_by

    def made_otherwise(self, replica: str, prompt: Prompt, body: bytes, why: str) -> None:
        """Record that the replica's engine made other tokens from a prompt than the gateway did.

        `body`: the request's body, b"" if it is no longer in memory; `why`: the difference, in words.
        """
        member = self.members.get(replica)
        if member is not None and member.space is not None and member.space.number == prompt.space:
            member.space.comparison.made_otherwise(member.replica.engine, prompt, body, why)

    def made_alike(self, replica: str, prompt: Prompt) -> None:
        """Record that the replica's engine counted as many tokens in the prompt as the gateway did.

        It is called for a kind of prompts for which the counts once differed.
        """
        member = self.members.get(replica)
        if member is not None and member.space is not None and member.space.number == prompt.space:
            member.space.comparison.made_alike(member.replica.engine, prompt)

    def has_room(self, replica: str, tokens: int) -> bool:
        """Return whether `tokens` fit into the replica's context, or True if the context's length is unknown."""
        member = self.members.get(replica)
        return member is None or not member.context or tokens <= member.context

    # --- replicas come, change and go

    def adopt(self, replica: Replica) -> ModelSpace:
        """Put a ready replica into the space (format of prompts) that matches its engine's report, and return it."""
        member = self.members.get(replica.id)
        if member is not None and member.replica is not replica:
            self._drop(member)
            member = None
        if member is None:
            member = self.members[replica.id] = Member(replica)
        if member.incarnation != replica.incarnation:
            member.incarnation, member.context, member.set_apart = replica.incarnation, None, False
            if not member.served & replica.models.keys():  # otherwise it most likely has the same files as before
                member.source = self._files.known(replica)
            self._find_files(member)
        elif member.source is None and member.finding is None and member.again is None:
            self._find_files(member)
        member.context = replica.max_model_len or member.context
        member.served = frozenset(replica.models) or member.served
        format, names = self._format_of(member), set(base_names(replica.models))
        space = member.space
        if space is None or space.format != format or (space.names and names and not space.names & names):
            space = self._space_for(member, format, names)
        space.names |= names
        if replica.version:
            space.pipeline.follow(replica.version_quirks, at_once=False)
        space.pipeline.media.root = space.root
        space.comparison.compare(replica)
        return space

    def forget(self, replica: Replica) -> None:
        """Drop a replica that is gone, and its space (format of prompts) if no other replica uses that."""
        member = self.members.get(replica.id)
        if member is not None and member.replica is replica:
            self._drop(member)
            self._drop_empty()

    def stop(self) -> None:
        self._files.stop()
        for one in (*self.members.values(), *self.spaces):
            one.stop()

    def _judged(self, space: ModelSpace) -> None:
        """Move replicas whose engines make other tokens than the rest of their space to a space without model files.

        `space`: the group of replicas with one format of prompts whose engines have been compared. Prompts for the
        moved replicas are matched as text. The gateway's tokens stay exact for the other engines.
        """
        engines = space.comparison.set_apart()
        moving = [one for one in space.members.values() if one.replica.engine in engines]
        for member in moving:
            member.set_apart = True
        for member in moving:
            self.adopt(member.replica)
        if moving:
            self.on_change()

    def _format_of(self, member: Member) -> PromptFormat:
        """Return the format of the prompts that a replica takes, from what its engine reports and the settings."""
        replica, space = member.replica, member.space
        before = PromptFormat(None, DEFAULT_BLOCK_SIZE, VersionQuirks()) if space is None else space.format
        size = self._settings.block_size or replica.stored_size or replica.block_size or before.block_size
        is_told = replica.version or space is None
        quirks = VersionQuirks.of(replica.version_quirks) if is_told else before.quirks
        return PromptFormat(None if member.set_apart else member.source, size, quirks, replica.looks_ahead)

    def _space_for(self, member: Member, format: PromptFormat, names: set[str]) -> ModelSpace:
        """Move a replica to a space (replicas with one format of prompts) that has this format; return the space.

        The space is an existing one, or one that no other replica uses and that now gets this format, or a new one.
        `names`: the names by which the replica serves its model.
        """
        old = member.space
        alike = [one for one in self.spaces if one.format == format and one.members]
        space = next((one for one in alike if one.names & names or not (one.names and names)), None)
        if space is None:
            free = [one for one in self.spaces if not one.members or (one is old and _has_no_other(one, member))]
            space = next((one for one in free if one.format.source == format.source or one is old), None)
            if space is not None:
                self._retune(space, format)
            else:
                space = self._new_space(format, names)
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

    def _retune(self, space: ModelSpace, format: PromptFormat) -> None:
        """Change the format of a space whose present format no replica needs any more.

        If the model's files differ, the new ones are loaded in the background; until then prompts are matched as text.
        """
        old = space.format
        space.follow(format)
        if old.source != format.source:
            space.use(self._files.new_pipeline(None))
            space.problem = ""
            self._load(space)

    def _new_space(self, format: PromptFormat, names: set[str]) -> ModelSpace:
        pipeline, costs = self._files.new_pipeline(None), CostGroup()
        space = ModelSpace(next(self._numbers), format, pipeline, costs, self._judged, self._files.loading)
        space.names = set(names)
        self.spaces.append(space)
        self._load(space)
        return space

    def _share_costs(self, space: ModelSpace, names: set[str]) -> None:
        """Let all variants of a model share their learned costs of tokens (`CostGroup`).

        A space that is reused for another model starts to learn again. `names`: the names that the model is served by.
        """
        relative = next((one for one in self.spaces if one is not space and one.names & names), None)
        if relative is not None:
            space.costs = relative.costs
        elif space.names and not space.names & names:
            space.costs = CostGroup()
        space.names = set(names)

    def _drop(self, member: Member) -> None:
        del self.members[member.replica.id]
        member.stop()
        self._leave(member)

    def _leave(self, member: Member) -> None:
        space, member.space = member.space, None
        if space is None or space.members.get(member.replica.id) is not member:
            return
        del space.members[member.replica.id]
        if not any(one.replica.engine == member.replica.engine for one in space.members.values()):
            space.comparison.forget(member.replica.engine)

    def _drop_empty(self) -> None:
        """Drop the spaces (formats of prompts) that have no replicas, but keep one if no space has any.

        Replicas that come back then use that one again.
        """
        for space in [one for one in self.spaces if not one.members]:
            if len(self.spaces) > 1:
                self.spaces.remove(space)
                space.stop()

    def _say(self, space: ModelSpace) -> None:
        """Log the variants of this space's model if they have changed since they were last logged.

        Nothing is logged while the files of a variant are still searched.
        """
        variants = [one for one in self.spaces if one.members and one.names & space.names]
        if any(member.finding is not None for one in variants for member in one.members.values()):
            return
        formats, before = frozenset(one.format for one in variants), self._said.get(space.name)
        self._said[space.name] = formats
        if len(variants) < 2 or formats == before:
            return
        first, *others = variants
        unlike = [f"{', '.join(one.members)} have {one.format.differences(first.format)}" for one in others]
        log.warning("model %s has %d variants, for %d of which prompts are prepared, and replicas of others are chosen by "
                    "load: %s", space.name, len(variants), min(len(variants), MOST_VARIANTS), "; ".join(unlike))  # fmt: skip

    # --- files are found, and pipelines loaded

    def _find_files(self, member: Member) -> None:
        member.stop()
        member.finding = asyncio.create_task(self._found(member, member.incarnation))

    async def _found(self, member: Member, incarnation: str) -> None:
        try:
            before = member.problem
            source, problem = await self._files.find(member.replica), ""
        except Exception as error:
            source, problem = None, str(error) or type(error).__name__
            if problem != before:
                log.error("looking for the files of replica %s failed: %s", member.replica.id, problem, exc_info=error)
        member.finding, member.problem = None, problem
        changed = source != member.source and incarnation == member.replica.incarnation
        if changed:
            member.source = source
            self.adopt(member.replica)
        space = member.space
        if space is not None and space.problem and not changed and space.may_pass and space.loading is None:
            self._load(space)
        self._look_again(member)
        if changed or problem != before:
            self.on_change()
        if member.space is not None:
            self._say(member.space)

    def _look_again(self, member: Member) -> None:
        """Schedule another search for the replica's model files if they cannot be found or used.

        The pause before the search doubles each time, up to 60 seconds.
        """
        if not member.problem and (member.space is None or not member.space.problem):
            member.pause = 0.0
            return
        member.replica.tokenizer = "not compared: its model's files cannot be used here"
        if member.finding is None and member.again is None and self.members.get(member.replica.id) is member:
            member.pause = min(2 * member.pause or model_files.RETRY_SECONDS, model_files.MOST_RETRY_SECONDS)
            member.again = asyncio.get_running_loop().call_later(member.pause, self._find_files, member)

    def _find_again(self, names: set[str]) -> None:
        """Search again for the files of replicas that were wrongly given the files of the operator's model.

        `names`: the names of the model that these replicas serve.
        """
        for member in [one for one in self.members.values() if names.intersection(base_names(one.replica.models))]:
            member.source = None
            self._find_files(member)
            self.adopt(member.replica)
        self.on_change()

    @property
    def waiting_for(self) -> str | None:
        """The tokenizer that is being loaded, in words, or None.

        It is None if no replica waits for a tokenizer, or if one is in use already.
        """
        spaces = [one for one in self.spaces if one.members]
        if any(one.format.source is not None and one.loading is None for one in spaces):
            return None
        waiting = next((one.replica for one in self.members.values() if _waits(one)), None)
        if waiting is None:
            return None
        return f"the tokenizer of {min(base_names(waiting.models), default='the model')}, which is being loaded"

    @property
    def loading(self) -> set[str]:
        """The names of models and adapters whose tokenizer is still being found or loaded.

        A name is left out as soon as one replica that serves it has its tokenizer and takes traffic.
        """
        members = self.members.values()
        waiting = {name for one in members if _waits(one) for name in one.replica.models}
        taking = [one for one in members if one.replica.state in TAKES_TRAFFIC and not _waits(one)]
        return waiting - {name for one in taking for name in one.replica.models}

    def _load(self, space: ModelSpace) -> None:
        if space.loading is not None:
            space.loading.cancel()
            space.loading = None
        if space.format.source is None:
            space.problem = ""
        else:
            space.loading = asyncio.create_task(self._loaded(space, space.format.source))

    async def _loaded(self, space: ModelSpace, source: Source) -> None:
        before, pipeline = space.problem, None
        try:
            pipeline, space.problem = await self._files.load(source, space.name if space.names else None), ""
        except Exception as error:  # a model's folder may contain anything, and must not stop other models
            space.problem, space.may_pass = f"{type(error).__name__}: {error}", not isinstance(error, ConfigError)
            if not space.may_pass:
                space.problem = str(error)
            if space.problem != before:
                log.error("no tokenizer: prompts of %s are matched as text. Its files cannot be used: %s", space.name,
                          space.problem, exc_info=error if space.may_pass else None)  # fmt: skip
        if pipeline is not None:
            space.use(pipeline)
            told = next((one.replica.version_quirks for one in space.members.values() if one.replica.version), {})
            pipeline.follow(told, at_once=False)
            pipeline.media.root = space.root
            for member in space.members.values():
                space.comparison.compare(member.replica)
        space.loading = None
        for member in space.members.values():
            self._look_again(member)
        self.on_change()


def _has_no_other(space: ModelSpace, member: Member) -> bool:
    """Return whether only the replicas of this member's engine use the space's format.

    A replica whose engine has restarted does not count until it is adopted again, since its format may change then.
    """
    engine = member.replica.engine
    return all(
        one.replica.engine == engine or one.incarnation != one.replica.incarnation for one in space.members.values()
    )


def _waits(member: Member) -> bool:
    """Return whether the tokenizer for this replica's prompts is still being found or loaded."""
    if member.finding is not None and member.source is None and not member.problem:
        return True
    space = member.space
    return space is not None and space.loading is not None and not space.problem and space.pipeline.tokenizer is None
