"""The kinds of bodies, by their features (`prompt.features`), of which one engine counted other tokens.

One odd answer is no evidence: a strange string, a month that turned at midnight or a wrong usage would leave all plain
chats without exact prompts for as long as the engine runs. So a kind of body is *doubted* after its first miscounted
body (no request is refused by such a count), *held* inexact after a second, different one, and trusted again after
ENOUGH equal counts in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..prompt import Prompt

ENOUGH = 32  # equal counts in a row
MOST_KINDS = 64  # per engine; clients can create kinds by sending unknown fields


@dataclass(slots=True)
class Kind:
    """The state of one doubted kind of bodies."""

    why: str  # how its last miscounted body was counted
    last: tuple[int, int, int]  # identifies that body
    held: bool = False  # whether bodies of this kind count as inexact
    alike: int = 0  # equal counts since that body


class Doubts:
    """The doubts about one engine's tokens. A kind covers all bodies that have its features, and maybe more."""

    def __init__(self) -> None:
        self.kinds: dict[frozenset[str], Kind] = {}

    @property
    def held(self) -> dict[frozenset[str], str]:
        return {known: kind.why for known, kind in self.kinds.items() if kind.held}

    def miscounted(self, body: frozenset[str] | None, prompt: Prompt, why: str) -> bool:
        """Record that the engine tokenized a body differently, and return whether any doubt changed.

        `body`: its features; None: they are not known. `why`: the difference, in words.
        """
        api = frozenset((prompt.path,))
        body = api if body is None else api | body
        last = (prompt.tokens, prompt.rendered_chars, prompt.hashes[-1] if len(prompt.hashes) else 0)
        covering = {known: kind for known, kind in self.kinds.items() if known <= body}
        for kind in covering.values():
            kind.alike = 0
        if (body in covering and body == api) or any(kind.held for kind in covering.values()):
            return False
        # A miscounted body of unknown features is no evidence against its whole API.
        if (known := next((one for one in covering if one != api), None)) is not None:
            if covering[known].last == last:
                return False
            self._replace(known, Kind(why, last, held=True))
        elif len(self.kinds) >= MOST_KINDS:
            second = any(api <= one and kind.last != last for one, kind in self.kinds.items())
            self._replace(api, Kind(why, last, held=second))
        else:
            self.kinds[body] = Kind(why, last)
        return True

    def _replace(self, plainer: frozenset[str], kind: Kind) -> None:
        self.kinds = {known: one for known, one in self.kinds.items() if not plainer <= known}
        self.kinds[plainer] = kind

    def counted_alike(self, body: frozenset[str]) -> bool:
        """Record a body that the engine counted as the gateway did, and return whether a kind is trusted again."""
        for kind in (kind for known, kind in self.kinds.items() if known <= body):
            kind.alike += 1
        before, self.kinds = self.kinds, {known: kind for known, kind in self.kinds.items() if kind.alike < ENOUGH}
        return len(self.kinds) < len(before)
