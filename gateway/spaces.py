"""What belongs to one model: a `ModelSpace` is one way of making prompts, and the replicas that take them so.

A space has a tokenizer, a chat template, a block size, and the quirks of the engine's version. All replicas whose
engines work alike are of one space. Replicas that serve the same name but differ in any of this (a rolling upgrade to
another block size, a tokenizer that was changed on disk between two starts) are variants of the model with a space
each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from policies import CostGroup
from policies.kv_space import prompt_bytes
from replicas import Replica

from .model_files import Source
from .ops.comparison import TokenizerComparison
from .prompt.pipeline import Pipeline
from .prompt.quirks import VersionQuirks


class PromptFormat(NamedTuple):
    """What makes prompts differ. `source` None: no files are known here, so prompts are matched as text."""

    source: Source | None
    block_size: int
    quirks: VersionQuirks
    looks_ahead: int = 0  # so many tokens behind a block are part of its name

    @property
    def blocks(self) -> tuple[int, int]:
        """What makes blocks differ."""
        return self.block_size, self.looks_ahead

    def differences(self, other: PromptFormat) -> str:
        """In words, what sets this variant apart."""
        told = []
        if self.block_size != other.block_size:
            told.append(f"blocks of {self.block_size} tokens instead of {other.block_size}")
        if self.looks_ahead != other.looks_ahead:
            told.append(f"blocks named by {self.looks_ahead} tokens behind them too instead of {other.looks_ahead}")
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
        self,
        number: int,
        format: PromptFormat,
        pipeline: Pipeline,
        costs: CostGroup,
        judged: Callable[[ModelSpace], None],
    ):
        self.number, self.format, self.costs = number, format, costs
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

    @property
    def root(self) -> str:
        """Where its engines have the model from; "" where they do not tell, or not all the same."""
        roots = {one.replica.root for one in self.members.values()}
        return (roots.pop() or "") if len(roots) == 1 else ""

    def use(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        pipeline.space, (pipeline.block_size, pipeline.looks_ahead) = self.number, self.format.blocks
        self.prompt_bytes = prompt_bytes(pipeline.config, self.format.block_size)

    def follow(self, format: PromptFormat) -> None:
        """Make prompts in this way from now on, with the same files."""
        self.format = format
        self.pipeline.block_size, self.pipeline.looks_ahead = format.blocks
        self.prompt_bytes = prompt_bytes(self.pipeline.config, format.block_size)
