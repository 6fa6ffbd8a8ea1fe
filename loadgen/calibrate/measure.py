"""Measurement: sends the questions of a plan and turns the observed times into samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import accumulate, pairwise
from statistics import median
from time import monotonic

from . import samples
from .ask import CalibrationError, Client, Refused, Reply
from .fit import Fit, fit
from .learn import at_work
from .plan import FEW, MOST, SMALLEST, STEPS, Limits, Plan, Question, sizes
from .samples import Sample

PROBES = 3
LONG = 4.0  # times the median gap: a step that also computes much of another request's prompt
SURE = 0.02  # enough rounds once a further one changes no region's times by more
IDLE_SECONDS = 5.0  # for the engine to finish earlier requests
WORDS_PER_TOKEN = 0.75


class Meter:
    """A measurement of one engine: `probe` finds out how fast it is, then `run` follows a plan."""

    def __init__(self, client: Client, limits: Limits):
        self.client, self.limits = client, limits

    async def probe(self, seconds: float) -> Fit:
        """Return a first fit, from a few prompts and replies of increasing size, after two that warm the engine up."""
        for size in (SMALLEST, 8 * SMALLEST):
            await self.client.complete(self.client.ids(size), 8)
        seen: list[Sample] = []
        for size in (size for size in sizes(self.limits.longest, 4) for _ in range(PROBES)):
            if seen and seen[-1].seconds * 16 > seconds / 10 and len(seen) % PROBES == 0:
                break
            seen += await self.ask(Question(samples.NEW, size))
        largest, few = int(seen[-1].parts["token"]), min(FEW, self.limits.max_num_seqs)
        for size, count in ((SMALLEST, 1), (largest, 1), (SMALLEST, few)):
            seen += await self.ask(Question(samples.DECODE, size, count=count, output=STEPS + 2 * count))
        return fit(seen)

    async def budget(self, found: Fit, seconds: float) -> tuple[int, str]:
        """Return max_num_batched_tokens and how it was found.

        It is derived from the number of tokens one request gets while the long prompt of another is computed.
        """
        size = SMALLEST
        while 2 * size <= self.limits.longest and self._alone(found, 2 * size, size) < seconds / 40:
            size *= 2
        counts = []
        for _ in range(PROBES):
            decoding = await self._beside(self.client.ids(size))
            counts.append(full_steps([later - sooner for sooner, later in pairwise(decoding.times)]))
        steps = round(median(counts))
        if steps >= 2:
            return size // steps, f"seen: a prompt of {size} tokens was computed in {steps} steps"
        least = next(one for one in (2048, 8192, 16384, 1 << 62) if one >= size)
        why = f"assumed: at least {size}, a prompt of so many tokens was done in one step"
        return min(least, max(size, 16384)), why

    def _alone(self, found: Fit, tokens: int, budget: int) -> float:
        return found.seconds(samples.prompt(samples.NEW, 0, tokens, 0, budget).parts)

    async def at_once(self) -> tuple[int, str]:
        """Return max_num_seqs and how it was found, which works up to the number of requests sent at once."""
        asked = (self.client.complete(self.client.ids(SMALLEST), STEPS + 2 * MOST) for _ in range(MOST))
        ran = most_at_once(await _together(*asked))
        if ran < MOST:
            return ran, f"seen: of {MOST} requests {ran} ran at once"
        return self.limits.max_num_seqs, f"assumed: a usual default; {MOST} requests ran at once"

    async def run(
        self,
        plan: Plan,
        seconds: float,
        told: Callable[[int, Fit], None] = lambda done, found: None,
        busy: bool = False,
    ) -> list[Sample]:
        """Return the samples of all rounds of the plan.

        Ends earlier, but not before the first round is complete, when the times no longer change or `seconds` are over.
        `told` is called after each round with the number of rounds and the fit.
        """
        seen: list[Sample] = []
        began, before = monotonic(), None
        for number in range(plan.rounds):
            if not busy:
                await self.until_idle()
            for question in self.client.rng.sample(plan.questions, len(plan.questions)):
                seen += await self.ask(question)
            found = fit(seen)
            told(number + 1, found)
            late = monotonic() - began > seconds * (number + 1) / (number + 2)
            if late or (before is not None and number >= 2 and changed(seen, before, found) < SURE):
                break
            before = found
        return seen

    async def until_idle(self) -> None:
        """Wait until the engine is idle, as others' requests would be measured too. Raises CalibrationError."""
        deadline = monotonic() + IDLE_SECONDS
        while (count := await at_work(self.client)) and monotonic() < deadline:
            await asyncio.sleep(0.05)
        if count:
            raise CalibrationError(
                f"{count} requests of others are in the engine: take it out of traffic, or it is they that are measured"
            )

    async def ask(self, question: Question) -> list[Sample]:
        """Return the samples of one question; none if it cannot be sent or shows nothing."""
        client, region, tokens = self.client, question.region, question.tokens
        if region in (samples.DECODE, samples.BURST):
            return await self._ask_many(question)
        if region == samples.TEXT:
            return await self._ask_text(question)
        ids, cached = client.ids(tokens), 0
        reply = await client.complete(ids)
        if region == samples.CACHED:
            reply = await client.complete(ids + client.ids(question.extra))
            cached = self._cached(reply, tokens)
        return [samples.prompt(region, reply.ttft, tokens + question.extra, cached, self._budget)]

    async def _ask_text(self, question: Question) -> list[Sample]:
        text = self.client.text(round(question.tokens * WORDS_PER_TOKEN))
        try:
            await self.client.complete(text)
            reply = await self.client.complete(text)
        except Refused:
            return []  # no chat template, or more tokens than the engine takes
        if reply.prompt is None:
            return []
        cached = self._cached(reply, reply.prompt - 1)
        return [samples.prompt(samples.TEXT, reply.ttft, reply.prompt, cached, self._budget)]

    async def _ask_many(self, question: Question) -> list[Sample]:
        count, size = question.count, question.tokens
        prompts = [self.client.ids(size) for _ in range(count)]
        for ids in prompts:
            await self.client.complete(ids)
        replies = await _together(*(self.client.complete(ids, question.output) for ids in prompts))
        if question.region == samples.BURST:
            last = max(reply.times[0] for reply in replies) - min(reply.sent for reply in replies)
            return [samples.burst(last, count, size, self._cached(replies[0], size - 1), self._budget)]
        seconds, tokens = step_seconds(replies)
        return [samples.decode(seconds, count, count * (size + tokens), spread(replies[0]))] if seconds else []

    async def _beside(self, prompt: list[int]) -> Reply:
        """Return a decoding request's reply; a request with `prompt` arrives meanwhile, at any moment of a step."""
        going = asyncio.get_running_loop().create_future()
        steps = 3 * STEPS + -(-len(prompt) // self._budget)

        def at_tenth(reply: Reply) -> None:
            if len(reply.times) >= 10 and not going.done():
                going.set_result((reply.times[-1] - reply.times[0]) / 9)

        async def other() -> Reply:
            await asyncio.sleep(await going * self.client.rng.random())
            return await self.client.complete(prompt)

        return (await _together(self.client.complete(self.client.ids(SMALLEST), steps, at_tenth), other()))[0]

    @property
    def _budget(self) -> int:
        return self.limits.max_num_batched_tokens

    def _cached(self, reply: Reply, at_most: int) -> int:
        """Return the cached tokens as the engine reports them, else all full blocks."""
        return reply.cached if reply.cached is not None else at_most // self.limits.block_size * self.limits.block_size


async def _together(*questions) -> list[Reply]:
    """Send all requests concurrently; if one fails, cancel the others, in the engine too."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(question) for question in questions]
    except* CalibrationError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def step_seconds(replies: list[Reply]) -> tuple[float, int]:
    """Return the seconds of a step while all replies decode, and the tokens each had by the middle of that time.

    The seconds are 0 if they never decoded all at once. The slowest tenth of the steps is left out, as something else
    ran. Where the API server put several tokens into a chunk, its gap counts as that many steps.
    """
    begin, end = max(reply.times[0] for reply in replies), min(reply.times[-1] for reply in replies)
    steps, tokens = [], 0.0
    for reply in replies:
        inside = [time for time in reply.times if begin <= time <= end]
        share = (reply.tokens - 1) / max(1, len(reply.times) - 1)
        gaps = sorted(later - sooner for sooner, later in pairwise(inside))
        gaps = gaps[: len(gaps) - len(gaps) // 10] if share < 1.05 else gaps
        steps += [gap / share for gap in gaps]
        tokens += (len(inside) / 2 + sum(time < begin for time in reply.times)) * share
    return (sum(steps) / len(steps) if len(steps) >= STEPS // 4 else 0.0), round(tokens / len(replies))


def spread(reply: Reply) -> float | None:
    """Return the standard deviation of the steps of one reply as a share of their median, without outliers.

    Returns None where several chunks were read at once, as on a busy machine, so that single steps were not observed.
    """
    gaps = [later - sooner for sooner, later in zip(reply.times, reply.times[1:])]
    if gaps.count(0.0) > len(gaps) // 10:
        return None
    usual = median(gaps)
    return 1.4826 * median(abs(gap / usual - 1) for gap in gaps)


def full_steps(gaps: list[float]) -> int:
    """Return how many full steps the computation of a long prompt took.

    These are the long gaps up to the longest: each is longer than the one before because its tokens attend to more, and
    the remainder in the last step is shorter.
    """
    usual = median(gaps)
    upto = gaps[: gaps.index(max(gaps)) + 1]
    long = [gap for gap in upto if gap > LONG * usual]
    return sum(gap > long[0] / 2 for gap in long) if long else 1


def most_at_once(replies: list[Reply]) -> int:
    """Return the maximum number of replies that were between their first and last tokens at one time."""
    ends = sorted([(reply.times[0], 1) for reply in replies] + [(reply.times[-1], -1) for reply in replies])
    return max(accumulate(change for _, change in ends))


def changed(seen: list[Sample], before: Fit, after: Fit) -> float:
    """Return the largest change of the times of a region between two fits (median within the region)."""
    shares: dict[str, list[float]] = {}
    for sample in seen:
        shares.setdefault(sample.region, []).append(
            abs(after.seconds(sample.parts) - before.seconds(sample.parts)) / sample.seconds
        )
    return max(median(one) for one in shares.values())
