"""The kinds of request bodies for which one engine reported another token count than the gateway computed.

A kind is a set of features of a body (`prompt.features`). One wrong count is no evidence: a strange string, a new month
at midnight or a wrong usage report may cause it. It must not make all plain chats inexact for as long as the engine
runs. Therefore a kind is only *doubted* after its first miscounted body: its token counts are not used to refuse
requests. After a second, different body it is *held* to be inexact. It is trusted again after ENOUGH equal counts in a
row.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..prompt import Prompt
from ..prompt.features import PLAIN

ENOUGH = 32  # equal counts in a row
# Equal counts by other engines in a row, after which the engine that counts otherwise is the odd one. They are fewer
# than ENOUGH, since until then bodies of a held kind are inexact at every engine of the model.
ELSEWHERE = 8
MOST_KINDS = 64  # per engine; clients can create kinds by sending unknown fields


@dataclass(slots=True)
class Kind:
    """The state of one kind of bodies whose token counts are doubted."""

    why: str  # how the token counts of its last miscounted body differed
    last: tuple[int, int, int]  # identifies that body: tokens, characters, last block hash
    held: bool = False  # whether bodies of this kind count as inexact
    alike: int = 0  # equal counts since that body
    elsewhere: int = 0  # equal counts by other engines since one of them miscounted such a body


class Doubts:
    """The doubts about one engine's tokens, by kind of bodies.

    A kind is a set of features. A body is of that kind if it has all of these features; it may have others too.
    """

    def __init__(self) -> None:
        self.kinds: dict[frozenset[str], Kind] = {}

    @property
    def held(self) -> dict[frozenset[str], str]:
        return {known: kind.why for known, kind in self.kinds.items() if kind.held}

    def miscounted(self, body: frozenset[str] | None, prompt: Prompt, why: str) -> bool:
        """Record that the engine tokenized a body differently from the gateway; return whether any doubt changed.

        `body`: the body's features, or None if they can no longer be determined. `why`: the difference, in words.
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
        """Record that the engine counted a body's tokens as the gateway did; return whether a kind is trusted again.

        `body`: the body's features.
        """
        before = len(self.kinds)
        for kind in self._covering(body):
            kind.alike += 1
        self.kinds = {known: kind for known, kind in self.kinds.items() if kind.alike < ENOUGH}
        return len(self.kinds) < before

    def counted_elsewhere(self, body: frozenset[str], is_alike: bool) -> None:
        """Record whether another engine of the model counted a body's tokens as the gateway did (`is_alike`).

        `body`: the body's features.
        """
        for kind in self._covering(body):
            kind.elsewhere = kind.elsewhere + 1 if is_alike else 0

    @property
    def stands_alone(self) -> bool:
        """Whether this engine alone tokenizes a plain kind of bodies differently from the gateway.

        The other engines of the model must have counted enough such bodies as the gateway did. A doubt about an unusual
        kind does not matter here, since the engine's prompts of all other kinds stay exact.
        """
        return any(
            kind.held and kind.elsewhere >= ELSEWHERE and len(known - PLAIN) <= 1 for known, kind in self.kinds.items()
        )

    def _covering(self, body: frozenset[str]) -> list[Kind]:
        return [kind for known, kind in self.kinds.items() if known <= body]
