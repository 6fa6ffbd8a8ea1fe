"""What a request would truly take on each replica: for the oracles, from the engines themselves.

Seconds to the first token = the rest of the step under way + what must end before there is room + the steps that
compute the prompts before it and its own, with the decoding there in each; plus what it costs others: the seconds of
its own prefill for each stream that stands still meanwhile, at a weight of 0.03, since requests that come meanwhile
meet that stream.

Seconds of the whole answer = those to the first token + its own decode steps, in the batch as it then is + what it adds
to the answers of all others there: its prefill, for each stream, and for as long as both decode what one sequence more
makes a step longer. This is the rise of the sum of all answers' times, so a second is a second, whoever waits for it.
Its own prefill counts twice more, for those who come meanwhile and for what it evicts: with 0, 2 and 8 times more the
mean answer of agents takes 570, 569 and 604 ms at 30 % of saturation, and 701, 694 and 701 ms at 70 %.

Still a forecast in these places: who waits is taken to find in the cache what was there when first looked at, blocks
that ending requests share count for each, streams that end are taken to be replaced, and requests that come later are
not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from policies import Demand

if TYPE_CHECKING:
    from loadgen.simulate.replica import Replica
    from replicas.simulated.batch import Sequence as Waiting
    from replicas.simulated.engine import Engine

INTERFERENCE = 0.03
LATER = 2.0  # times that its own prefill counts for requests that are not here yet


class _View(NamedTuple):
    """A request on one replica: seconds to its first token, of its own prefill, and of the streams there."""

    first: float
    own: float
    streams: int
    context: int


# Prompt tokens that requests have to compute, as of the first look at each
_wanted: WeakKeyDictionary[Waiting, int] = WeakKeyDictionary()


def outlook(engine: Engine) -> tuple[int, int, int, int]:
    """Return the load that a new request meets: the prompt tokens to compute before its own, the blocks they will take
    beyond the free ones (negative: blocks left), the number of decoding requests, and their context in tokens."""
    size, tokens, blocks = engine.profile.block_size, 0, -engine.pool.free
    begun = engine.running > len(engine.batch.sequences)  # the first prompt is computed in part
    for place, one in enumerate(engine.to_prefill):
        if begun and place == 0:
            wanted, new = one.tokens - one.computed, -(-one.tokens // size) - len(one.held)
        else:
            if one not in _wanted:
                _wanted[one] = one.tokens - engine.cached(one.keys, one.tokens) * size
            wanted = _wanted[one]
            new = -(-wanted // size)
        tokens += wanted
        blocks += new
    return tokens, blocks, len(engine.batch.sequences), engine.batch.context


def to_come(engine: Engine) -> tuple[list[int], int]:
    """Return each request's output tokens to come, and the context of all requests that do not decode yet."""
    left = [one.finish - engine.batch.now for one in engine.batch.sequences.values()]
    waiting = engine.to_prefill
    return left + [one.limit - one.generated for one in waiting], sum(one.tokens for one in waiting)


def steps_until_free(engine: Engine, blocks: int) -> int:
    """Return in how many steps ending requests free `blocks` blocks, if no other request takes them."""
    steps = 0
    for one in sorted(engine.batch.sequences.values(), key=lambda one: one.finish):
        if blocks <= 0:
            break
        blocks -= len(one.held)
        steps = one.finish - engine.batch.now
    return steps


class Truth:
    """`among`: the replicas, by index, that are the candidates now, and `output`: the length of the reply; the gateway
    that asks says so."""

    def __init__(self, replicas: Sequence[Replica], now: Callable[[], float]) -> None:
        self._replicas, self._now = replicas, now
        self.among: Sequence[int] = range(len(replicas))
        self.output = 1

    def seconds(self, index: int, asked: Demand) -> float:
        """Return the time to the first token on candidate `index`, and the delay this puts on others there."""
        view = self._view(self._replicas[self.among[index]], asked)
        return view.first + INTERFERENCE * view.streams * view.own

    def answer_seconds(self, index: int, asked: Demand) -> float:
        """Return the time to the last token on candidate `index`, and what this adds to the answers of others there."""
        replica, output = self._replicas[self.among[index]], self.output
        view, profile = self._view(replica, asked), replica.engine.profile
        left, waiting = to_come(replica.engine)
        others, context = len(left), view.context + waiting

        def step(streams: int, tokens: int) -> float:
            return profile.step.seconds(0, 0.0, streams, tokens, profile.in_use(tokens)) / profile.speedup

        alone = step(others, context)
        together = step(others + 1, context + asked.tokens + output // 2)
        shared = sum(min(steps, output) for steps in left)
        return view.first + (output - 1) * together + (view.streams + LATER) * view.own + shared * (together - alone)

    def _view(self, replica: Replica, asked: Demand) -> _View:
        engine, profile, now = replica.engine, replica.engine.profile, self._now()
        hits = engine.cached(asked.hashes, asked.tokens)
        ahead, short, streams, context = outlook(engine)
        uncached = asked.tokens - hits * profile.block_size
        usage = profile.in_use(context)

        def prefill(tokens: int) -> float:
            """Steps of prompts, each with all that decodes."""
            room, time, took = profile.max_num_batched_tokens - streams, profile.step, 0.0
            while tokens > 0:
                took += time.seconds(min(tokens, room), 0.0, streams, context, usage)
                tokens -= room
            return took / profile.speedup

        pairs = profile.step.attention * uncached * (hits * profile.block_size + uncached / 2) * 1e-3 / profile.speedup
        first = replica.step_ends(now) - now + prefill(ahead + uncached) + pairs
        own = prefill(uncached) + pairs
        short += -(-asked.tokens // profile.block_size) - hits
        if short > 0:
            step = profile.step.seconds(0, 0.0, streams, context, usage) / profile.speedup
            first += steps_until_free(engine, short) * step
        return _View(first, own, streams, context)
