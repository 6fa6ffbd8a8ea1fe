"""Model spaces: a `ModelSpace` is one format of prompts, and the replicas that take it.

The format is a tokenizer, a chat template, a block size, and the quirks of the engine's version. Replicas of one model
with the same format share a space. Replicas may serve the same name with different formats, for example in a rolling
upgrade to another block size, or if the tokenizer was changed on disk between two starts. Each of these variants of the
model has a space.
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
from .threads import FolderThreads


class PromptFormat(NamedTuple):
    """A format of prompts: the model's files, the block size in tokens, and the quirks of the engine's version.

    Quirks are ways in which older versions of the engine make prompts differently. Without files (`source` None) there
    is no tokenizer, and prompts are matched as text.
    """

    source: Source | None
    block_size: int
    quirks: VersionQuirks
    looks_ahead: int = 0  # the number of tokens after a block that its hash includes

    @property
    def blocks(self) -> tuple[int, int]:
        """The block size in tokens, and the number of tokens after a block that the block's hash includes."""
        return self.block_size, self.looks_ahead

    def differences(self, other: PromptFormat) -> str:
        """Return in words how this format differs from `other`."""
        names = ("files", "block size", "version's prompts", "tokens behind a block that name it")
        unlike = [(name, mine, its) for name, mine, its in zip(names, self, other, strict=True) if mine != its]
        return ", ".join(f"{name} {mine} instead of {its}" for name, mine, its in unlike)


@dataclass(eq=False, slots=True)
class Member:
    """A replica in a space, with what its process had reported when the replica last joined a space.

    A space groups the replicas that take one format of prompts. `incarnation`: identifies the process, and changes when
    the engine restarts.
    """

    replica: Replica
    incarnation: str | None = None  # None: not adopted yet
    space: ModelSpace | None = None
    served: frozenset[str] = frozenset()  # the model names that it reported last, kept while it is away
    # The model files from which its process was started; later changes on disk do not matter. Until these are found,
    # the files of its previous process, or those found last for its model.
    source: Source | None = None
    finding: asyncio.Task[None] | None = None
    problem: str = ""  # why its files cannot be found or read
    pause: float = 0.0  # seconds before they are looked at again
    again: asyncio.TimerHandle | None = None
    context: int | None = None  # the longest prompt in tokens
    # Its engine makes other tokens from the same files than other engines do, so its prompts are matched as text.
    set_apart: bool = False

    def stop(self) -> None:
        """Cancel the running search for the replica's model files, and the next one that is scheduled."""
        for one in (self.finding, self.again):
            if one is not None:
                one.cancel()
        self.again = None


class ModelSpace:
    """A model, or one variant of it: the format of its prompts, and the replicas that take this format.

    `judged`: called after an engine's tokens were compared with the gateway's. `loading`: the task that loads the
    pipeline, or None.
    """

    def __init__(
        self,
        number: int,
        format: PromptFormat,
        pipeline: Pipeline,
        costs: CostGroup,
        judged: Callable[[ModelSpace], None],
        threads: FolderThreads,
    ):
        self.number, self.format, self.costs = number, format, costs
        self.names: set[str] = set()  # names by which its replicas serve the base model
        self.members: dict[str, Member] = {}
        self.loading: asyncio.Task[None] | None = None
        self.problem = ""  # why the files cannot be used
        self.may_pass = False  # whether the problem may go away although the files stay the same
        self.use(pipeline)
        self.comparison = TokenizerComparison(lambda: self.pipeline, lambda: judged(self), threads)

    @property
    def name(self) -> str:
        return min(self.names, default="the model")

    @property
    def context(self) -> int | None:
        """The longest context of the space's replicas in tokens, or None if unknown."""
        return max((one.context or 0 for one in self.members.values()), default=0) or None

    @property
    def root(self) -> str:
        """The folder that all engines of the space report as the model's root; "" if they report none or several."""
        roots = {one.replica.root for one in self.members.values()}
        return (roots.pop() or "") if len(roots) == 1 else ""

    def stop(self) -> None:
        """Stop loading the pipeline, and stop comparing the engines' tokens with the gateway's."""
        self.comparison.stop()
        if self.loading is not None:
            self.loading.cancel()

    def use(self, pipeline: Pipeline) -> None:
        """Make prompts with this pipeline from now on, with the space's present block size."""
        self.pipeline = pipeline
        pipeline.space, (pipeline.block_size, pipeline.looks_ahead) = self.number, self.format.blocks
        self.prompt_bytes = prompt_bytes(pipeline.config, self.format.block_size)

    def follow(self, format: PromptFormat) -> None:
        """Use the block size of this format from now on; the pipeline, with its model files, stays in use."""
        self.format = format
        self.pipeline.block_size, self.pipeline.looks_ahead = format.blocks
        self.prompt_bytes = prompt_bytes(self.pipeline.config, format.block_size)
