"""What the versions of an engine make differently of the same request.

Which version has which quirk is known to the engine's dialect (`replicas.engines`), which tells it as plain values.
What transformers makes differently does not follow the engine's version, only the range of releases that it may be
installed with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Transformers:
    """The releases of transformers that an engine may run with: `oldest` <= it < `below`."""

    oldest: tuple[int, int] = (5, 5)
    below: tuple[int, int] = (99, 0)

    def __str__(self) -> str:
        least = "transformers {}.{} or newer".format(*self.oldest)
        return least if self.below > (5, 99) else least.replace("or newer", "to before {}.{}".format(*self.below))

    def has(self, since: tuple[int, int]) -> bool | None:
        """Whether it has what came with a release; None: it may or may not."""
        return True if self.oldest >= since else False if self.below <= since else None


@dataclass(frozen=True, slots=True)
class VersionQuirks:
    """Those of one version. The defaults are the newest version's, which an unknown one is taken for. The numbers are
    vLLM's."""

    # True: the version's chat rules have been read. None: not read, so chats are exact only after the fixed chats
    # compared equal (`ops.chats`). False: known to differ, so chats are matched as text.
    chats_known: bool | None = True
    # It refuses what the vLLM versions that were read refuse. False: that is left to the engine.
    refuses_alike: bool = True
    tokenizes_all: bool = True  # 0.33: /tokenize writes all chats as they are computed, gpt-oss' too
    between_parts: str = "\n"  # what joins the texts of a message where the template wants one text; SGLang's " "
    # SGLang: a tool's function keeps the order in which the client wrote its keys, and the tool has a `defer_loading`
    # of null where the client gave none.
    tools_as_given: bool = False
    ids_field: str = ""  # of a chat: ids in this field stand in the place of its messages
    # Fields that change a prompt or its blocks in a way that is not followed here.
    unfollowed: frozenset[str] = frozenset()
    arguments_are_objects: bool = True  # 0.29: tool-call arguments that are other JSON become {}
    looks_into_macros: bool = True  # 0.30: parts for a template that loops over content in a macro's parameter
    asks_template: bool = True  # 0.31: Messages probe the model's own template, and know `thinking`
    drops_attribution: bool = True  # 0.32: Claude Code's line goes from system texts of chat, too
    truncates_to_output: bool = False  # until 0.31: -1 leaves room for max_tokens, since then for one token
    # False: an engine that may write by other rules what `render.programs` writes, and show other tools and results.
    rules_are_known: bool = True
    harmony_recipient_last: bool | None = True  # 0.32 (oss-harmony): as now; False: as in 0.28; None: it is not known
    deepseek_v4: bool | None = True  # 0.32: its rules as now; False: as in 0.28; None: it is not known
    shows_custom_tools: bool | None = True  # 0.32: of Responses, as functions of one text; None: it is not known
    # 0.33: results of tools alone do not begin a turn; before, they did as in DeepSeek-V4
    deepseek_v41_results_continue: bool = True
    follows_namespaces: bool = True  # 0.33: parts for a template that loops over messages kept in a namespace
    leaves_one: bool = True  # 0.33: truncation to the context leaves one token for a chat that has no limit, too
    forwards_past_media: bool = False  # until 0.31: forwarded ids count though `echo` or media need the messages
    media_identity: str | None = "framed"  # how an image's name is made, see `media.identity`; None: it is not known
    transformers: Transformers = Transformers()

    @property
    def drops_none(self) -> bool | None:
        """Keys of a message whose value is None do not reach the template. None: they may or may not."""
        return self.transformers.has((5, 20))

    @property
    def copies_reasoning(self) -> bool | None:
        """A message's reasoning reaches the template as `thinking`, too."""
        return self.transformers.has((5, 21))

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> VersionQuirks:
        """`told`: fields that are not as in the newest version; `transformers` as (oldest, below)."""
        fields = dict(told)
        if "transformers" in fields:
            fields["transformers"] = Transformers(*fields["transformers"])
        return cls(**fields)


NEWEST = VersionQuirks()
