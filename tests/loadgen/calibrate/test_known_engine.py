"""A simulated engine whose timing is known is measured and found again, in virtual time: so no busy machine is in it.

The meter, its plan and its fit are the real ones; in place of HTTP stands the engine itself with a clock that jumps
from one event to the next.
"""

import asyncio
import heapq
import itertools
import selectors

import pytest

from loadgen.calibrate import measure as plan
from loadgen.calibrate.ask import LIMITS, Client, Limits, Reply
from loadgen.calibrate.fit import CACHED, NEW, TEXT, decode_sample, fit, prompt_sample
from loadgen.calibrate.measure import Meter
from replicas.simulated.engine import Engine, EngineRequest
from replicas.simulated.profile import FrontEnd, Profile, RequestTime, StepTime

KNOWN = {
    "a small model on a CPU": Profile(
        "cpu", StepTime(base=2.5, prefill=2.0, prefill_token=0.01, attention=1.5e-5, decode_sequence=0.1, decode_context_token=2e-4, spread=0.06),
        RequestTime(latency=3.5, work=1.6, token=0.002, text=1.2, text_token=0.003),
        num_blocks=8192, max_num_seqs=128, max_num_batched_tokens=2048,
        max_model_len=16384),
    "a large one on a GPU": Profile(
        "gpu", StepTime(base=8, prefill=4, prefill_token=0.03, attention=2e-7, decode_sequence=0.04, decode_context_token=1e-5),
        RequestTime(latency=5, work=1.2, token=0.001, text_token=0.002), num_blocks=8192, max_num_seqs=256, max_num_batched_tokens=8192,
        max_model_len=16384),
}  # fmt: skip
TOLERANCE = 0.05  # of any time that the profile gives
TOLD = dict.fromkeys(LIMITS, "reported by the engine")


class JumpingLoop(asyncio.SelectorEventLoop):
    """Does not wait: its clock moves on to the next timer instead."""

    def __init__(self):
        super().__init__(self.Selector())
        self.now, self._selector.loop = 1000.0, self

    def time(self) -> float:
        return self.now

    class Selector(selectors.SelectSelector):
        def select(self, timeout=None):
            if timeout:
                self.loop.now += timeout
            return super().select(0)


class EngineClient(Client):
    """Asks an engine in this process; a word is a token."""

    def __init__(self, profile: Profile):
        super().__init__("http://nowhere", seed=1)
        self.engine, self.front, self.names = Engine(profile, every_token=True), FrontEnd(profile), itertools.count()
        self.coming, self.telling, self.awake = [], {}, asyncio.Event()
        self.task = asyncio.ensure_future(self._run())

    async def complete(self, prompt, tokens=1, seen=None) -> Reply:
        loop, text, name = asyncio.get_running_loop(), isinstance(prompt, str), next(self.names)
        ids = prompt.split() if text else prompt
        size = self.engine.profile.block_size
        keys = [hash(tuple(ids[: n * size])) for n in range(1, len(ids) // size + 1)]
        reply, done = Reply(tokens), loop.create_future()
        reply.record.sent, reply.record.prompt_tokens = loop.time(), len(ids)
        self.telling[name] = reply, seen, done
        due = self.front.reaches_engine(loop.time(), len(ids), text, self.engine.running > 0)
        heapq.heappush(self.coming, (due, name, EngineRequest(name, keys, len(ids), tokens)))
        self.awake.set()
        await asyncio.wait((done, self.task), return_when=asyncio.FIRST_COMPLETED)
        return reply if done.done() else self.task.result()

    async def _run(self):
        loop = asyncio.get_running_loop()
        while True:
            # the clock has stepped to it, give or take a bit
            while self.coming and self.coming[0][0] <= loop.time() + 1e-9:
                self.engine.add(heapq.heappop(self.coming)[2])
            step = self.engine.step()
            if step is None:
                self.awake.clear()
                if self.coming:
                    await asyncio.sleep(self.coming[0][0] - loop.time())
                else:
                    await self.awake.wait()
                continue
            await asyncio.sleep(step.seconds)
            for output in step.outputs:
                reply, seen, done = self.telling[output.id]
                reply.times.append(loop.time())
                reply.record.cached_tokens = output.cached_tokens
                if seen is not None:
                    seen(reply)
                if output.finished:
                    done.set_result(None)


async def calibrated(profile: Profile):
    """The fit, and the limits as they would be found without /server_info."""
    told = TOLD | {"max_num_seqs": "assumed", "max_num_batched_tokens": "assumed"}
    limits = Limits(profile.max_model_len, profile.block_size, profile.num_blocks, 256, 8192, told)
    async with EngineClient(profile) as client:
        meter = Meter(client, limits)
        meter.until_idle = lambda: asyncio.sleep(0)  # nobody else is there
        found = await meter.probe(120)
        seen_budget, seen_seqs = await meter.budget(found, 120), await meter.at_once()
        meter.limits = Limits(profile.max_model_len, profile.block_size, profile.num_blocks, profile.max_num_seqs,
                                   profile.max_num_batched_tokens, TOLD)  # fmt: skip
        work = plan.make(meter.limits, found, 120)
        seen = await meter.run(plan.Plan(work.questions, 1, work.round_seconds), 1e9)
        client.task.cancel()
    return fit(seen), seen_budget, seen_seqs, work, seen


def run(profile: Profile):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(calibrated(profile))


@pytest.mark.parametrize("name", KNOWN)
def test_its_times_are_found_again(name):
    profile = KNOWN[name]
    found, budget, seqs, work, seen = run(profile)
    ms = {field: getattr(part, field) for part in (profile.request, profile.step) for field in part.__slots__}

    def known(sample):
        return 1e-3 * sum(ms[part] * times for part, times in sample.parts.items())

    limit = profile.max_num_batched_tokens
    for sample in (
        *(prompt_sample(NEW, 0, n, 0, limit) for n in (64, 1000, 5000, 10_000)),
        *(prompt_sample(CACHED, 0, n + 100, n, limit) for n in (64, 1024, 9600)),
        *(prompt_sample(TEXT, 0, n, n - 16, limit) for n in (64, 2000)),
        *(decode_sample(0, count, count * each) for count in (1, 8, 32) for each in (64, 3000)),
    ):
        assert found.seconds(sample.parts) == pytest.approx(known(sample), rel=TOLERANCE), sample
    assert found.spread == pytest.approx(profile.step.spread, abs=0.02)
    assert (
        {sample.region for sample in seen} == set(found.residuals) == {question.region for question in work.questions}
    )
    # bursts: when the last one comes, half a step is left on average
    assert max(one.typical for one in found.residuals.values()) < 0.08


def test_what_it_does_not_tell_is_seen():
    _, (budget, source), (seqs, other), _, _ = run(KNOWN["a small model on a CPU"])
    assert budget == 2048 and source.startswith("seen: a prompt of")
    assert seqs == 256 and other.startswith("assumed")
