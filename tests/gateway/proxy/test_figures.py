"""What answers took, by class and model, as clients behind real sockets saw it."""

import asyncio
from bisect import bisect_left
from types import SimpleNamespace

import pytest

from gateway.ops.metrics import Histogram, Metrics
from gateway.proxy.observers.figures import MOST_MODELS, OTHER, Figures

from ..http.talk import eventually, read_request
from .replies import EVENT, SSE_HEAD, answers, chunk, post, reply, streams
from .stack import stack
from .test_queue import USAGE, Engine, fills, overload, queued, told, waits

GAP = 0.05


async def stream(reader, writer):
    """20 tokens, one in 50 ms after the first."""
    while True:
        await read_request(reader)
        writer.write(SSE_HEAD + chunk(EVENT))
        for _ in range(19):
            await asyncio.sleep(GAP)
            writer.write(chunk(EVENT))
        writer.write(chunk(USAGE) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def observed(metrics):
    return {
        name: metric.values
        for name, metric in vars(metrics).items()
        if name.startswith(("answer_", "slo_")) and isinstance(metric, Histogram) and metric.values
    }


async def test_a_stream_is_measured_by_class_and_model():
    async with stack(stream, slo_figures=True) as s:
        assert (await told(s, "a"))[0] == 200
        await eventually(s.idle)
        metrics, key = s.metrics, ("default", "m")
        assert [metrics.answer_ttft_seconds.count(key), metrics.answer_e2e_seconds.count(key)] == [1, 1]
        assert metrics.answer_tpot_seconds.mean(key) > 0.6 * GAP
        # 20 tokens, usage and [DONE]; a busy machine may read two of them at once
        assert metrics.answer_itl_seconds.count(key) in range(10, 22)
        assert metrics.answer_itl_seconds.mean(key) > 0.6 * GAP
        tokens = {kind: metrics.answer_tokens.total(model="m", kind=kind) for kind in ("input", "cached", "output")}
        assert tokens == {"input": 9, "cached": 0, "output": 20}
        spent = metrics.answer_phase_seconds.by("phase")
        assert sum(spent.values()) == pytest.approx(metrics.answer_e2e_seconds.mean(key), rel=1e-6)
        assert spent["decode"] > 0.9 and spent["queue"] < spent["decode"]


@pytest.mark.parametrize(
    ("elapsed", "pieces", "tail"),
    [(0.27, 13, 0.27 / 13), (0.5, 1, 0.5), (1.2, 5, 0.95), (10.0, 100, 9.75), (0.3, 2, 0.15)],
)
def test_a_pause_is_not_hidden_by_the_pieces_behind_it(elapsed, pieces, tail):
    """`tail`: the longest gap that is known, of the pieces that came within `elapsed` seconds of the last."""
    metrics = Metrics()
    figures = Figures(metrics)
    figures.serve(["m"])
    exchange, attempt = SimpleNamespace(), SimpleNamespace()
    attempt.streams, attempt.pauses, attempt.prompt = True, 0, SimpleNamespace(model="m")
    attempt.first_at, attempt.seen_at, attempt.seen_pieces, attempt.pieces = 100.0, 101.0, 4, 4 + pieces
    figures.passing(exchange, attempt, 101.0 + elapsed)
    gaps, key = metrics.answer_itl_seconds, ("default", "m")
    assert gaps.count(key) == pieces and gaps.mean(key) * pieces == pytest.approx(elapsed)
    longest = max(i for i, count in enumerate(gaps.values[key][:-1]) if count)
    assert longest == bisect_left(gaps.bounds, tail), "it is in the bucket of the pause"


async def test_a_replica_has_not_taken_what_another_one_took_to_refuse():
    async def refuse(reader, writer):
        while True:
            await read_request(reader)
            await asyncio.sleep(0.5)
            writer.write(reply(status=b"503 Service Unavailable"))

    async with stack(refuse, streams(chunk(EVENT))) as s:
        refusing, answering = s.proxy.backends
        for _ in range(2):  # one of them begins at the second replica
            assert (await told(s, "a"))[0] == 200
        await eventually(s.idle)
        clients, of_replica = s.metrics.ttft_seconds, s.metrics.replica_ttft_seconds
        assert s.metrics.retries.total() == 1
        assert clients.count(()) == of_replica.count(answering) == 2 and of_replica.count(refusing) == 0
        assert 2 * (clients.mean(()) - of_replica.mean(answering)) >= 0.5


async def test_a_replica_has_not_taken_what_its_request_waited_in_the_queue():
    engine = Engine()
    async with queued(engine) as (s, queue):
        first = await fills(s, engine)
        second = await waits(s, queue, "b")
        await asyncio.sleep(0.3)
        engine.answer("a", "b")
        assert (await first.response())[0] == (await second.response())[0] == 200
        await eventually(s.idle)
        [replica] = s.proxy.backends
        clients, of_replica = s.metrics.ttft_seconds, s.metrics.replica_ttft_seconds
        assert 2 * (clients.mean(()) - of_replica.mean(replica)) >= 0.3
        # What the limits are about is what clients wait.
        assert s.metrics.answer_ttft_seconds.mean(("free", "m")) == pytest.approx(clients.mean(()))


async def test_an_answer_in_one_piece_has_an_end_and_no_first_token():
    usage = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":2}}'
    async with stack(answers(usage), slo_figures=True) as s:
        assert (await s.ask(post()))[0] == 200
        await eventually(s.idle)
        assert [*observed(s.metrics)] == ["answer_e2e_seconds"]
        assert s.metrics.answer_tokens.total(kind="output") == 2


async def test_without_classes_limits_and_the_flag_nothing_is_measured():
    async with stack(stream) as s:
        assert (await told(s, "a"))[0] == 200
        await eventually(s.idle)
        assert s.proxy.figures is None and not observed(s.metrics) and not s.metrics.answer_tokens.values


async def test_the_time_in_the_queue_is_a_phase_of_its_own():
    engine = Engine()
    async with queued(engine) as (s, queue):
        first = await fills(s, engine)
        second = await waits(s, queue, "b", b"x-tier: premium")
        await asyncio.sleep(0.3)
        engine.answer("a", "b")
        assert (await first.response())[0] == (await second.response())[0] == 200
        await eventually(s.idle)
        spent = s.metrics.answer_phase_seconds
        assert spent.total(**{"class": "premium", "phase": "queue"}) >= 0.3
        assert spent.total(**{"class": "free", "phase": "queue"}) < 0.3 <= spent.total(phase="engine")
        assert set(s.metrics.answer_e2e_seconds.values) == {("premium", "m"), ("free", "m")}


async def test_attempts_that_failed_are_a_phase_of_their_own():
    async def fails(reader, writer):
        await read_request(reader)
        await asyncio.sleep(0.2)
        writer.write(reply(b"{}", b"500 Internal Server Error"))

    async with stack(fails, stream, slo_figures=True) as s:
        for name in "ab":
            assert (await told(s, name))[0] == 200
            await eventually(s.idle)
        assert s.metrics.answer_phase_seconds.total(phase="retry") >= 0.2


async def test_a_client_that_leaves_is_nobodys_failure():
    engine = Engine()
    slo = overload().classes.all[0].slo._replace(ttft=30.0)
    async with queued(engine, slo=slo) as (s, queue):
        talker = await fills(s, engine)
        await talker.close()
        await eventually(s.idle)
        assert not s.metrics.slo_requests.values and not observed(s.metrics)


def test_labels_stay_few_whatever_models_come_and_go():
    metrics = Metrics()
    figures = Figures(metrics)

    class Asked:
        model = "no such model\n"

    assert figures.model_of(Asked) == OTHER
    for round in range(5):
        figures.serve([f"model-{round}-{number}" for number in range(30)])
        metrics.answer_e2e_seconds.observe(("default", f"model-{round}-0"), 1.0)
    figures.serve([f"served-{number}" for number in range(200)])
    assert len(metrics._known["model"]) <= MOST_MODELS + 1
    Asked.model = "served-199"
    assert figures.model_of(Asked) == OTHER
    Asked.model = "served-0"
    assert figures.model_of(Asked) == "served-0"
    assert len(metrics.answer_e2e_seconds.values) == 0, "what is served no more has given its place away"


async def test_models_are_known_before_their_first_request():
    async with stack(stream, slo_figures=True) as s:
        s.metrics.know("class", ["default"])
        page = (await s.metrics.exposition())[0].decode()
        assert 'hitherto_answer_e2e_seconds_count{class="default",model="m"} 0.0' in page
