"""Which ways of a request are good for it: those that have room for it, and those that meet its limits.

What room is, and what it is to meet limits, stands in `admission`, which asks. Predictions are checked: of those that
came near a limit, the ratio of what was met to what was predicted has a running quantile, and a prediction counts that
much longer. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import ceil, exp, inf, log

from .classes import NO_LIMITS, Classes
from .control import TIGHT
from .lines import Line, Ticket
from .quotes import Place, Quote
from .reserves import Reserves
from .verdicts import Offers, Rules

_QUANTILE, _GAIN = 0.95, 0.01  # of the ratios, and how far one moves it, as a logarithm
_MOST = log(1.5)  # that a margin gets: answers come late, so a crowd of bad ones says more than it should
_NEAR = 0.25  # share of a limit from which a prediction says something of that limit


class Margin:
    """By how much what was met exceeds what was predicted, in all but one of twenty cases: a running quantile, by
    stochastic approximation (Robbins and Monro, 1951)."""

    __slots__ = ("_log",)

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        return exp(self._log)

    def learn(self, predicted: float, met: float, limit: float) -> None:
        if predicted >= _NEAR * limit and met > 0.0:
            over = log(met / predicted) > self._log
            self._log = min(_MOST, max(0.0, self._log + _GAIN * (_QUANTILE if over else _QUANTILE - 1.0)))


class Question:
    """A request that is judged now. `quotes`: of each of its ways, with their `places`; `best`: the one of the least
    TTFT; `room`: the indices of the ways that have room for it, as far as is known yet."""

    __slots__ = ("ticket", "quotes", "best", "places", "replicas", "offers", "now", "waited", "room")

    def __init__(
        self, ticket: Ticket, quotes: Sequence[Quote], now: float, places: Sequence[Place], offers: Offers
    ) -> None:
        self.ticket, self.quotes, self.places, self.offers, self.now = ticket, quotes, places, offers, now
        self.best, self.waited = min(quotes), now - ticket.since - ticket.held
        self.replicas: frozenset[str] = frozenset().union(*places)
        self.room: Sequence[int] = ()

    @property
    def limited(self) -> bool:
        """Without limits every quote would meet them, and nobody would ever be refused."""
        return self.ticket.slo != NO_LIMITS

    @property
    def ttft(self) -> float:
        """Seconds to its first token, with those that it has waited, if it is sent now."""
        return self.waited + self.best.ttft

    def computing(self, whole: bool) -> dict[int | str, int]:
        """Return by replica how many prompts it computes; of those that take whole requests, or first legs."""
        if not self.places:
            return {index: one.computing for index, one in enumerate(self.quotes)} if whole else {}
        pairs = zip(self.places, self.quotes, strict=True)
        return {place[0]: one.computing for place, one in pairs if (len(place) == 1) is whole}

    def is_whole(self, index: int) -> bool:
        return not self.places or len(self.places[index]) == 1


class Fit:
    """Of one fleet. `reserves`: what classes have had of it; `tight`: the classes that are to find less room."""

    def __init__(self, classes: Classes, rules: Rules, reserves: Reserves) -> None:
        self._rules, self._reserves = rules, reserves
        self.ttft_margin, self.tpot_margin = Margin(), Margin()
        self.tight: frozenset[str] = frozenset()
        self._tpot = min([one.slo.tpot for one in classes.all if one.slo.tpot is not None], default=inf)

    def room(
        self, asked: Question, quotes: Sequence[Quote], fits: Callable[[Quote, float, float], bool] | None = None
    ) -> Sequence[int]:
        """Return the ways that have room for it, or that it `fits`, besides what is kept for classes above its own. A
        prompt that has begun cannot be interrupted, so the whole of their fractions is kept from computing lower ones'
        at a time; of streams and cache, what they have not used of it lately. Nor does it join one of their prompts: an
        engine computes both in one step, which is as long as both."""
        qos, reserves, fits = asked.ticket.qos, self._reserves, fits or self.has_room
        above, first = reserves.above(qos, asked.now), reserves.others_yield(qos, asked.now)
        tight = TIGHT if qos.name in self.tight else 1.0
        share = inf if first else tight * (1.0 - sum([reserves.unused(one) for one in above]))
        kept = sum([one.reserved_fraction for one in above])
        clear = [_clear(asked.computing(whole).values(), kept) for whole in (False, True)]
        room = [
            index
            for index, one in enumerate(quotes)
            if clear[asked.is_whole(index)] >= (not one.computing)
            and fits(one, share, tight)
            and not (one.computing and asked.places and reserves.computes(asked.places[index][0], above, asked.now))
        ]
        return [index for index in room if not quotes[index].computing] or room if first else room

    def has_room(self, quote: Quote, share: float, tight: float) -> bool:
        """By the limits of the classes. Those of one request say nothing of whether others find room. `tight`: of what
        may be ahead of it."""
        if not quote.there:
            return True
        return (
            quote.wait <= tight * self._rules.engine_wait
            and quote.tpot * self.tpot_margin.factor <= share * self._tpot
            and quote.full <= share
        )

    def fast(self, ticket: Ticket, quotes: Sequence[Quote], room: Sequence[int]) -> Sequence[int]:
        """Return those of the ways with room that keep its own TPOT limit, as an idle one does as well as any."""
        limit = ticket.slo.tpot
        if limit is None or limit >= self._tpot:
            return room
        factor = self.tpot_margin.factor
        return [index for index in room if not quotes[index].there or quotes[index].tpot * factor <= limit]

    def meeting(self, quotes: Sequence[Quote], asked: Question) -> list[int]:
        """Return those that meet its limits; none where it has no limits."""
        return [i for i, one in enumerate(quotes) if self.too_much(one, asked) is None] if asked.limited else []

    def too_much(self, quote: Quote, asked: Question) -> str | None:
        """Return which of its limits it does not meet."""
        ttft, tpot = asked.ticket.slo
        if ttft is not None and not self.within(quote, asked.waited, ttft):
            return "ttft"
        limit = self._tpot if tpot is None else min(self._tpot, tpot)
        return "tpot" if quote.tpot * self.tpot_margin.factor > limit else None

    def within(self, quote: Quote, waited: float, limit: float) -> bool:
        """Return whether its first token comes within that many seconds, with those that it has waited already."""
        return waited + quote.ttft * self.ttft_margin.factor <= limit


def _clear(computing: Collection[int], kept: float) -> int:
    """Return how many replicas compute nothing, besides the fraction that is kept so, which leaves one at least."""
    return sum([not one for one in computing]) - min(ceil(kept * len(computing) - 1e-9), len(computing) - 1)


def unclaimed(room: Sequence[int], places: Sequence[Place], ahead: Sequence[Line]) -> Sequence[int]:
    """Return those of the ways with room of which nobody in the lines `ahead` waits for a replica."""
    if not ahead or not room:
        return room
    if not places:
        return ()
    claimed: frozenset[str] = frozenset().union(*[one.targets for one in ahead])
    return [index for index in room if claimed.isdisjoint(places[index])]
