"""Plan the measurement of an engine from its limits and its speed in a few probes, and carry it out.

A question is one measurement: a request, or several at once. Every round has the same questions in another order, so
that a machine that is busier or warmer for a while does not affect only one kind. The questions' prompts grow by
factors of two or more, up to the engine's context and a quarter of its cache. A large question that would take more
than 2 % of the total time (LONGEST) is left out, because many rounds are worth more than long prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from statistics import median
from time import monotonic

import numpy as np

from .ask import CalibrationError, Client, Limits, Refused, Reply
from .fit import BURST, CACHED, DECODE, NEW, TEXT, Fit, Sample, burst_sample, decode_sample, fit, prompt_sample

SMALLEST = 64  # tokens of the shortest prompt
LONGEST = 0.02  # share of the total time that one question may take
FEW, MOST = 8, 64  # most requests at once: on any engine, and on one that is fast enough
STEPS = 32  # decode steps to observe with all requests decoding


@dataclass(frozen=True, slots=True)
class Question:
    """One measurement to make: one request, or several requests at once, of a given size."""

    region: str  # its kind, as in `fit`
    tokens: int  # length of a prompt
    extra: int = 0  # new tokens behind a cached prompt of that length, for the region CACHED
    count: int = 1  # requests at once
    output: int = 1  # output tokens of each request

    @property
    def sent(self) -> np.ndarray:
        """The numbers of requests, prompt tokens and output tokens that this question sends, as an array of three.

        Requests that only fill the cache are included.
        """
        requests = self.count if self.region == NEW else 2 * self.count
        return np.array([requests, self.tokens * requests + self.extra, self.count * (self.output - 1) + requests])

    def expected(self, fit: Fit, limits: Limits) -> float:
        """Return roughly how many seconds this question will take.

        `fit`: the engine's speed, as far as it is known; `limits`: the engine's limits.
        """
        budget, whole = limits.max_num_batched_tokens, self.tokens + self.extra
        took = self.count * fit.seconds(prompt_sample(NEW, 0, self.tokens, 0, budget).parts)
        if self.region in (DECODE, BURST):
            took += fit.seconds(burst_sample(0, self.count, self.tokens, self.tokens - 1, budget).parts)
        elif self.region != NEW:
            took += fit.seconds(prompt_sample(self.region, 0, whole, self.tokens - 1, budget).parts)
        return took + self.output * fit.seconds(decode_sample(0, self.count, self.count * self.tokens).parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """The questions of each round, the number of rounds, and the expected seconds of one round."""

    questions: tuple[Question, ...]
    rounds: int
    round_seconds: float

    @property
    def sent(self) -> np.ndarray:
        """The numbers of requests, prompt tokens and output tokens of all rounds."""
        return self.rounds * sum(question.sent for question in self.questions)


def make(limits: Limits, fit: Fit, seconds: float) -> Plan:
    """Return a plan of two to ten rounds that takes about `seconds`.

    `limits`: the engine's limits; `fit`: the engine's speed, by which the duration of each question is estimated.
    """
    took = {question: question.expected(fit, limits) for question in _questions(limits)}
    small = {question for question in took if question.tokens <= 4 * SMALLEST and question.count <= FEW}
    affordable = {one: each for one, each in took.items() if one in small or each <= LONGEST * seconds}
    each = sum(affordable.values())
    return Plan(tuple(affordable), max(2, min(10, int(seconds / each))), each)


def sizes(most: int, factor: int = 2) -> list[int]:
    """Return prompt lengths (tokens) that grow by `factor`, from 64 (SMALLEST) on; the last one is `most`."""
    grown = list(takewhile(lambda size: size * 1.4 < most, (SMALLEST * factor**n for n in range(40))))
    return [*grown, most]


def _questions(limits: Limits) -> Iterator[Question]:
    """Yield the questions of a round, as far as the engine's limits admit them, however long each takes."""
    longest, cache = limits.longest, limits.num_blocks * limits.block_size // 2
    for size in sizes(longest):
        yield Question(NEW, size)
        yield Question(TEXT, size)
    for size in sizes(longest, 4):
        for extra in (16, max(32, size // 4)):
            if size + extra < limits.max_model_len:
                yield Question(CACHED, size, extra)
    for count in (2**n for n in range(MOST.bit_length()) if 2**n <= limits.max_num_seqs):
        output = STEPS + 2 * count  # more for more requests, as they start one after the other
        for size in sizes(longest // 2, 8):
            if count * (size + output) <= cache and size + output < limits.max_model_len:
                yield Question(DECODE, size, count=count, output=output)
        if count >= 4:
            yield Question(BURST, SMALLEST, count=count)


PROBES = 3  # measurements of each size before the plan is made
LONG = 4.0  # a gap of more than so many median gaps is a step that also computed much of another request's prompt
SURE = 0.02  # there were enough rounds once a further one changes no region's times by a larger share
IDLE_SECONDS = 5.0  # for which the engine may go on with earlier requests
WORDS_PER_TOKEN = 0.75


class Meter:
    """A measurement of one engine: `probe` finds out how fast the engine is, then `run` follows a plan."""

    def __init__(self, client: Client, limits: Limits):
        self.client, self.limits = client, limits

    async def probe(self, seconds: float) -> Fit:
        """Measure a few prompts and replies of increasing size, and return a first fit.

        Two requests are sent before, to warm the engine up. `seconds`: duration of the whole measurement; longer
        prompts are left out once they would take too much of it.
        """
        for size in (SMALLEST, 8 * SMALLEST):
            await self.client.complete(self.client.ids(size), 8)
        seen: list[Sample] = []
        for size in (size for size in sizes(self.limits.longest, 4) for _ in range(PROBES)):
            if seen and seen[-1].seconds * 16 > seconds / 10 and len(seen) % PROBES == 0:
                break
            seen += await self.ask(Question(NEW, size))
        largest, few = int(seen[-1].parts["token"]), min(FEW, self.limits.max_num_seqs)
        for size, count in ((SMALLEST, 1), (largest, 1), (SMALLEST, few)):
            seen += await self.ask(Question(DECODE, size, count=count, output=STEPS + 2 * count))
        return fit(seen)

    async def budget(self, found: Fit, seconds: float) -> tuple[int, str]:
        """Return the engine's max_num_batched_tokens, and in words how it was found.

        The value is the length of a long prompt divided by the number of steps that compute it. A second request, which
        decodes meanwhile, reveals these steps: its tokens come at longer intervals during each of them. If a single
        step computed the prompt, a common default is assumed. `found`: the fit so far; `seconds`: duration of the whole
        measurement.
        """
        size = SMALLEST
        while 2 * size <= self.limits.longest:
            alone = prompt_sample(NEW, 0, 2 * size, 0, size)
            if found.seconds(alone.parts) >= seconds / 40:
                break
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

    async def at_once(self) -> tuple[int, str]:
        """Return the engine's max_num_seqs, and in words how it was found.

        The value is how many of 64 (MOST) requests the engine runs at the same time. If it runs all of them, a common
        default is assumed.
        """
        asked = (self.client.complete(self.client.ids(SMALLEST), STEPS + 2 * MOST) for _ in range(MOST))
        ran = most_at_once(await _together(*asked))
        if ran < MOST:
            return ran, f"seen: of {MOST} requests {ran} ran at once"
        return self.limits.max_num_seqs, f"assumed: a usual default; {MOST} requests ran at once"

    async def run(
        self, plan: Plan, seconds: float, told: Callable[[int, Fit], None] | None = None, busy: bool = False
    ) -> list[Sample]:
        """Ask the questions of all rounds of the plan, and return their samples.

        The measurement ends early, after a complete round, if `seconds` are nearly over or, from the third round on, if
        the times no longer change. `told`: called after each round with the number of rounds so far and the fit to all
        samples so far; `busy`: measure although the engine has requests of other clients.
        """
        seen: list[Sample] = []
        began, before = monotonic(), None
        for number in range(plan.rounds):
            if not busy:
                await self.until_idle()
            for question in self.client.rng.sample(plan.questions, len(plan.questions)):
                seen += await self.ask(question)
            found = fit(seen)
            if told:
                told(number + 1, found)
            late = monotonic() - began > seconds * (number + 1) / (number + 2)
            if late or (before is not None and number >= 2 and changed(seen, before, found) < SURE):
                break
            before = found
        return seen

    async def until_idle(self) -> None:
        """Wait until the engine is idle, because requests of other clients would change the measured times.

        Raises CalibrationError if the engine still has requests after 5 s (IDLE_SECONDS).
        """
        deadline = monotonic() + IDLE_SECONDS
        while (count := await self.client.at_work()) and monotonic() < deadline:
            await asyncio.sleep(0.05)
        if count:
            raise CalibrationError(f"{count} requests of others came to the engine: take it out of traffic")

    async def ask(self, question: Question) -> list[Sample]:
        """Send the requests of one question and return a list of its sample.

        The list is empty if the engine refuses a text prompt or does not report its length, or if there were too few
        steps in which all requests were decoding.
        """
        client, region, size, budget = self.client, question.region, question.tokens, self.limits.max_num_batched_tokens
        if region == TEXT:
            text = client.text(round(size * WORDS_PER_TOKEN))
            try:
                await client.complete(text)
                reply = await client.complete(text)
            except Refused:
                return []  # no chat template, or more tokens than the engine takes
            if (counted := reply.record.prompt_tokens) is None:
                return []
            return [prompt_sample(region, reply.ttft, counted, self._cached(reply, counted - 1), budget)]
        prompts = [client.ids(size) for _ in range(question.count)]
        replies = [await client.complete(ids) for ids in prompts]
        if region == NEW:
            return [prompt_sample(region, replies[0].ttft, size, 0, budget)]
        if region == CACHED:
            reply = await client.complete(prompts[0] + client.ids(question.extra))
            return [prompt_sample(region, reply.ttft, size + question.extra, self._cached(reply, size), budget)]
        replies = await _together(*(client.complete(ids, question.output) for ids in prompts))
        if region == BURST:
            last = max(reply.times[0] for reply in replies) - min(reply.record.sent for reply in replies)
            return [burst_sample(last, question.count, size, self._cached(replies[0], size - 1), budget)]
        seconds, tokens = step_seconds(replies)
        context = question.count * (size + tokens)
        return [decode_sample(seconds, question.count, context, spread(replies[0]))] if seconds else []

    async def _beside(self, prompt: list[int]) -> Reply:
        """Send a request, send another one with `prompt` while the first decodes, and return the first one's reply.

        The second request is sent at a random moment of a decode step, after ten tokens of the first reply have come.
        """
        going = asyncio.get_running_loop().create_future()
        steps = 3 * STEPS + -(-len(prompt) // self.limits.max_num_batched_tokens)

        def at_tenth(reply: Reply) -> None:
            if len(reply.times) >= 10 and not going.done():
                going.set_result((reply.times[-1] - reply.times[0]) / 9)

        async def other() -> Reply:
            await asyncio.sleep(await going * self.client.rng.random())
            return await self.client.complete(prompt)

        return (await _together(self.client.complete(self.client.ids(SMALLEST), steps, at_tenth), other()))[0]

    def _cached(self, reply: Reply, at_most: int) -> int:
        """Return how many tokens of the prompt the engine had cached.

        If the engine does not report the number, all full KV cache blocks of the first `at_most` prompt tokens count as
        cached.
        """
        cached, block = reply.record.cached_tokens, self.limits.block_size
        return cached if cached is not None else at_most // block * block


async def _together(*questions) -> list[Reply]:
    """Send requests concurrently and return their replies.

    `questions`: coroutines that send one request each. If one fails, the others are cancelled, in the engine too, and
    its CalibrationError is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(question) for question in questions]
    except* CalibrationError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def step_seconds(replies: list[Reply]) -> tuple[float, int]:
    """Return the seconds of a step while all replies decode, and how many tokens each had halfway through that time.

    The seconds are 0 if there were too few such steps. The slowest tenth of the steps is left out, because other work
    on the machine delayed them. If the API server puts several tokens into a chunk, the gap before the chunk counts as
    that many steps, and no step is left out.
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
    """Return the standard deviation of the durations of one reply's steps, as a share of their median.

    It is estimated from the median deviation, so that outliers do not affect it. Returns None if several chunks were
    read at once, as on a busy machine, because single steps were not observed then.
    """
    gaps = [later - sooner for sooner, later in pairwise(reply.times)]
    if gaps.count(0.0) > len(gaps) // 10:
        return None
    usual = median(gaps)
    return 1.4826 * median(abs(gap / usual - 1) for gap in gaps)


def full_steps(gaps: list[float]) -> int:
    """Return in how many full steps a long prompt was computed.

    `gaps`: seconds between the tokens of another request that decoded at the same time. The full steps are the long
    gaps up to the longest one. Each is longer than the one before, because later prompt tokens attend to more tokens. A
    last step with the remainder of the prompt is shorter and is not counted.
    """
    usual = median(gaps)
    upto = gaps[: gaps.index(max(gaps)) + 1]
    long = [gap for gap in upto if gap > LONG * usual]
    return sum(gap > long[0] / 2 for gap in long) if long else 1


def most_at_once(replies: list[Reply]) -> int:
    """Return the largest number of replies that were between their first and last tokens at the same time."""
    ends = sorted([(reply.times[0], 1) for reply in replies] + [(reply.times[-1], -1) for reply in replies])
    return max(accumulate(change for _, change in ends))


def changed(seen: list[Sample], before: Fit, after: Fit) -> float:
    """Return how much the predictions of two fits differ in the region (kind of measurement) that changed most.

    `seen`: the samples whose times both fits predict. The result is the median over the region's samples of the
    difference as a share of the measured time.
    """
    shares: dict[str, list[float]] = {}
    for one in seen:
        change = abs(after.seconds(one.parts) - before.seconds(one.parts)) / one.seconds
        shares.setdefault(one.region, []).append(change)
    return max(median(one) for one in shares.values())
