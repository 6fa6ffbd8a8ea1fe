"""The differences between engine versions in how they make a prompt from the same request.

The engine's dialect (`replicas.engines`) knows which version has which quirk, and passes the quirks as plain values.
Releases of the transformers library differ as well. The engine's version does not determine that release, only the
range of releases that may be installed with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Transformers:
    """A range of transformers releases that an engine may run with: from `oldest` up to but excluding `below`."""

    oldest: tuple[int, int] = (5, 5)
    below: tuple[int, int] = (99, 0)

    def __str__(self) -> str:
        least = "transformers {}.{} or newer".format(*self.oldest)
        return least if self.below > (5, 99) else least.replace("or newer", "to before {}.{}".format(*self.below))

    def has(self, since: tuple[int, int]) -> bool | None:
        """Return whether the releases in this range have a change that was made in release `since`.

        None: some of them have it and some do not.
        """
        return True if self.oldest >= since else False if self.below <= since else None


@dataclass(frozen=True, slots=True)
class VersionQuirks:
    """The choices that engine versions make differently when they turn a request into a prompt.

    The defaults are the newest version's, and are also used for an unknown version. A version number at the start of a
    comment is the first vLLM release that behaves as the default says.
    """

    # Whether the sources of this version's chat rendering have been read. None: they have not, so chats are exact only
    # after the engine's ids of fixed test chats have equalled the gateway's (`ops.chats`). False: the rendering is
    # known to differ, so chats are routed by their text.
    chats_known: bool | None = True
    # Whether the engine refuses the same requests as the vLLM versions whose sources were read, so that the gateway
    # may refuse them itself. False: refusing is left to the engine.
    refuses_alike: bool = True
    tokenizes_all: bool = True  # 0.33: /tokenize renders all chats, gpt-oss' too, as inference does
    between_parts: str = "\n"  # joins the text parts of a message for a template that takes one text; SGLang: " "
    # SGLang: a tool's function keeps the order in which the client wrote its keys, and the tool has a `defer_loading`
    # of null where the client gave none.
    tools_as_given: bool = False
    ids_field: str = ""  # the field of a chat request whose token ids replace the messages; "": there is none
    # Request fields that change a prompt or its blocks in a way that is not implemented here.
    unfollowed: frozenset[str] = frozenset()
    arguments_are_objects: bool = True  # 0.29: tool-call arguments that are other JSON become {}
    # 0.30: content is passed as parts also to a template that loops over it in a macro's parameter
    looks_into_macros: bool = True
    asks_template: bool = True  # 0.31: /v1/messages probes the model's own template, and reads `thinking`
    drops_attribution: bool = True  # 0.32: Claude Code's attribution line is also dropped from system texts of chats
    # until 0.31: `truncate_prompt_tokens` of -1 leaves room for max_tokens, since then for one token
    truncates_to_output: bool = False
    # False: the engine's rules may differ from those implemented here in two respects: for models whose conversations
    # are written without a template (`render.programs`), and for tools and tool results.
    rules_are_known: bool = True
    # gpt-oss: whether the header of a tool result names the recipient last, as in 0.32 (oss-harmony), or earlier, as in
    # 0.28; None: not known
    harmony_recipient_last: bool | None = True
    # DeepSeek-V4: whether its conversations are written as in 0.32 (True) or as in 0.28 (False); None: not known
    deepseek_v4: bool | None = True
    # 0.32: the model sees `custom` tools of /v1/responses, as functions that take one text; None: not known
    shows_custom_tools: bool | None = True
    # 0.33: a message with nothing but tool results does not begin a turn; before, it did, as in DeepSeek-V4
    deepseek_v41_results_continue: bool = True
    # 0.33: content is passed as parts also to a template that loops over the content of messages in a namespace
    follows_namespaces: bool = True
    # 0.33: truncation to the context length leaves one token of output also for a chat without an output limit
    leaves_one: bool = True
    # until 0.31: forwarded token ids are used even where `echo` or media need the messages
    forwards_past_media: bool = False
    media_identity: str | None = "framed"  # how images are named in block hashes (`media.identity`); None: not known
    transformers: Transformers = Transformers()

    @property
    def drops_none(self) -> bool | None:
        """Whether message keys with the value None are dropped before the template runs; None: uncertain."""
        return self.transformers.has((5, 20))

    @property
    def copies_reasoning(self) -> bool | None:
        """Whether the template also gets a message's reasoning as `thinking`; None: uncertain."""
        return self.transformers.has((5, 21))

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> VersionQuirks:
        """Return the quirks of an engine version.

        `told`: the fields in which the version differs from the newest one, by name, with `transformers` given as the
        pair (oldest, below).
        """
        fields = dict(told)
        if "transformers" in fields:
            fields["transformers"] = Transformers(*fields["transformers"])
        return cls(**fields)


NEWEST = VersionQuirks()
