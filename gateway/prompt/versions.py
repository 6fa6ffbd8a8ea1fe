"""What vLLM's versions make differently of the same request.

Read in the sources of 0.28 to 0.32; the two ends were compared token for token (tests/vllm/test_tokens.py). What
transformers makes differently does not follow vLLM's version, only the range of releases that it may be installed with.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = re.compile(r"v?(\d+)\.(\d+)")


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
class Ways:
    """The ways of one version. The defaults are those of the newest, which an unknown version is taken for."""

    arguments_are_objects: bool = True     # 0.29: tool-call arguments that are other JSON become {}
    looks_into_macros: bool = True         # 0.30: parts for a template that loops over content in a macro's parameter
    asks_template: bool = True             # 0.31: Messages probe the model's own template, and know `thinking`
    drops_attribution: bool = True         # 0.32: Claude Code's line goes from system texts of chat, too
    truncates_to_output: bool = False      # until 0.31: -1 leaves room for max_tokens, since then for one token
    forwards_past_media: bool = False      # until 0.31: forwarded ids count though `echo` or media need the messages
    # As the metadata of each version's package asks for it.
    transformers: Transformers = Transformers()

    @property
    def drops_none(self) -> bool | None:
        """Keys of a message whose value is None do not reach the template. None: they may or may not."""
        return self.transformers.has((5, 20))

    @property
    def copies_reasoning(self) -> bool | None:
        """A message's reasoning reaches the template as `thinking`, too."""
        return self.transformers.has((5, 21))


NEWEST = Ways()


def ways(version: str | None) -> Ways:
    """`version` as /version says it. What runs from a source tree calls itself 0.1 or less: it counts as newest."""
    match = _NUMBER.match(version or "")
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    if number <= (0, 1):
        return NEWEST
    return Ways(number >= (0, 29), number >= (0, 30), number >= (0, 31), number >= (0, 32), number < (0, 32), number < (0, 32),
                _transformers(number))


def _transformers(number: tuple[int, int]) -> Transformers:
    if number < (0, 29):
        return Transformers((5, 5))
    if number < (0, 31):
        return Transformers((5, 10))
    return Transformers(*{(0, 31): ((5, 10), (5, 18)), (0, 32): ((5, 16), (5, 20)), (0, 33): ((5, 16), (5, 21))}.get(number, ((5, 16),)))
