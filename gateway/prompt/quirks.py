"""The differences between engine versions in how they make prompts of the same request.

The engine's dialect (`replicas.engines`) knows which version has which quirk, and passes them as plain values.
Transformers' differences do not follow from the engine's version, only from the range of releases that may be installed
with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Transformers:
    """The releases of transformers that an engine may run with: from `oldest` to before `below`."""

    oldest: tuple[int, int] = (5, 5)
    below: tuple[int, int] = (99, 0)

    def __str__(self) -> str:
        least = "transformers {}.{} or newer".format(*self.oldest)
        return least if self.below > (5, 99) else least.replace("or newer", "to before {}.{}".format(*self.below))

    def has(self, since: tuple[int, int]) -> bool | None:
        """Return True if all these releases have a change that came with release `since`, False if none, else None."""
        return True if self.oldest >= since else False if self.below <= since else None


@dataclass(frozen=True, slots=True)
class VersionQuirks:
    """What an engine's version does differently from others when it makes prompts.

    The defaults are those of the newest version, which also serve for an unknown one. Version numbers are vLLM's: the
    first release that behaves so, where a comment begins with one.
    """

    # True: the version's chat rules have been read. None: not read, so chats are exact only after the fixed chats
    # compared equal (`ops.chats`). False: known to differ, so chats are matched as text.
    chats_known: bool | None = True
    # The gateway refuses what the vLLM versions whose sources were read refuse. False: that is left to the engine.
    refuses_alike: bool = True
    tokenizes_all: bool = True  # 0.33: /tokenize renders all chats, gpt-oss' too, as inference does
    between_parts: str = "\n"  # joins the texts of a message where the template takes one text; SGLang: " "
    # SGLang: a tool's function keeps the order in which the client wrote its keys, and the tool has a `defer_loading`
    # of null where the client gave none.
    tools_as_given: bool = False
    ids_field: str = ""  # a chat's field whose token ids replace its messages; "": none
    # Fields that change a prompt or its blocks in a way that is not implemented here.
    unfollowed: frozenset[str] = frozenset()
    arguments_are_objects: bool = True  # 0.29: tool-call arguments that are other JSON become {}
    looks_into_macros: bool = True  # 0.30: parts for a template that loops over content in a macro's parameter
    asks_template: bool = True  # 0.31: /v1/messages probes the model's own template, and reads `thinking`
    drops_attribution: bool = True  # 0.32: Claude Code's attribution line is also dropped from system texts of chats
    truncates_to_output: bool = False  # until 0.31: -1 leaves room for max_tokens, since then for one token
    # False: an engine whose rules may differ from those of `render.programs`, and those for tools and tool results.
    rules_are_known: bool = True
    harmony_recipient_last: bool | None = True  # True: as in 0.32 (oss-harmony); False: as in 0.28; None: not known
    deepseek_v4: bool | None = True  # True: its rules as in 0.32; False: as in 0.28; None: not known
    shows_custom_tools: bool | None = True  # 0.32: in /v1/responses, as functions of one text; None: not known
    # 0.33: results of tools alone do not begin a turn; before, they did as in DeepSeek-V4
    deepseek_v41_results_continue: bool = True
    follows_namespaces: bool = True  # 0.33: parts for a template that loops over messages kept in a namespace
    leaves_one: bool = True  # 0.33: truncation to the context leaves one token for a chat without a limit, too
    forwards_past_media: bool = False  # until 0.31: forwarded ids count though `echo` or media need the messages
    media_identity: str | None = "framed"  # the rule for images' names, see `media.identity`; None: not known
    transformers: Transformers = Transformers()

    @property
    def drops_none(self) -> bool | None:
        """Whether keys of a message with the value None are dropped before the template; None: uncertain."""
        return self.transformers.has((5, 20))

    @property
    def copies_reasoning(self) -> bool | None:
        """Whether the template also gets a message's reasoning as `thinking`; None: uncertain."""
        return self.transformers.has((5, 21))

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> VersionQuirks:
        """Return the quirks of a version.

        `told`: the fields that differ from the newest version, by name; `transformers` as (oldest, below).
        """
        fields = dict(told)
        if "transformers" in fields:
            fields["transformers"] = Transformers(*fields["transformers"])
        return cls(**fields)


NEWEST = VersionQuirks()
