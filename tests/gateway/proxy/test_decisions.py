"""Decisions for another proxy: the ledger is right whatever is told, in whatever order, or not at all."""

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from unittest.mock import AsyncMock

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import datapath
from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from gateway.proxy.placement import decisions as module
from gateway.proxy.placement.decisions import Decisions
from policies.ledger import FAR
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually
from .stack import backend_for, stack

PATH = "/v1/chat/completions"
ANSWER = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}\n\ndata: [DONE]\n\n'


def chat(text="a prompt " * 40, **fields) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "stream": True, **fields})


@asynccontextmanager
async def decisions(replicas=2, **options):
    async with stack(ports=range(9, 9 + replicas), ends_idle=False, **options) as s:
        yield s, Decisions(s.proxy)


async def refused(awaitable) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await awaitable
    return caught.value


async def test_its_reason_names_the_tokens_that_it_says_are_cached():
    """Also of a prompt that ends with a block, which counts as found where host memory has it."""
    async with decisions(replicas=1, pipeline=Pipeline(sim_model_dir(), "m", 16)) as (s, d):
        (backend,), cache_map = s.proxy.backends.values(), s.proxy.router.map
        cache_map.observed(backend.slot, True)
        body = orjson.dumps({"model": "m", "prompt": list(range(1, 97))})
        hashes = s.proxy.models.pipelines[0].prepare("/v1/completions", body).hashes
        cache_map.store(backend.slot, hashes[:2], [1, 2])
        cache_map.store(backend.slot, hashes, list(range(1, 7)), "cpu")
        told = await d.decide("/v1/completions", body, {})
        assert told["cached_tokens"] == told["tokens"] == 96
        assert "96 of 96 prompt tokens held (48 of them in slower tiers)" in told["reason"]


@pytest.mark.parametrize("value", [b"Mozilla/5.0 (\xc5\x81\xc3\xb3d\xc5\xba)", b"caf\xe9"], ids=["UTF-8", "Latin-1"])
async def test_a_clients_header_need_not_be_ascii(value):
    async with decisions() as (_, d):
        assert (await d.decide(PATH, chat(), {"user-agent": value.decode("utf-8", "surrogateescape")}))["replica"]


steps = st.lists(
    st.tuples(st.sampled_from(["decide", "whole", "first", "done", "expire", "lost", "back"]), st.integers(0, 5)),
    max_size=30,
)


@settings(max_examples=60)
@given(steps)
def test_nothing_is_left_whatever_happens(steps):
    async def play():
        async with decisions() as (s, d):
            made = []
            for what, number in steps:
                id = made[number % len(made)] if made else "nobody"
                try:
                    if what in ("decide", "whole", "expire"):
                        lease = 0.0 if what == "expire" else 60.0
                        body = chat(f"{number} " * 50, stream=what != "whole")
                        made.append((await d.decide(PATH, body, {}, (), lease))["id"])
                        await asyncio.sleep(0)
                    elif what == "first":
                        await d.first_byte(id)
                    elif what == "done":
                        await d.done(id, ANSWER % (50, 20, 16))
                    elif what == "lost":
                        s.proxy.remove("127.0.0.1:9")
                    elif "127.0.0.1:9" not in s.proxy.backends:
                        backend_for(s.proxy, 9)
                except ApiError as failure:
                    assert failure.code == "unknown_decision"
            for id in made:
                with suppress(ApiError):
                    await d.done(id, b"")
            await asyncio.sleep(0)
            assert s.idle() and not d.on()

    asyncio.run(play())


async def test_a_caller_that_leaves_as_the_answer_comes_leaves_nothing(monkeypatch):
    async with decisions() as (s, d):
        place, asked = s.proxy.placing.place, []
        monkeypatch.setattr(s.proxy.placing, "place", asked.append)  # as the shared ledger, which answers later
        deciding = asyncio.create_task(d.decide(PATH, chat(), {}))
        while not asked:
            await asyncio.sleep(0)
        place(asked[0])
        assert not s.idle()
        deciding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deciding
        assert s.idle()


async def test_a_model_loaded_a_moment_ago_is_asked_for_first():
    async def loaded():
        for backend in s.proxy.backends.values():
            backend.replica.models = {"m": None, "sql": "m"}
        s.proxy.changed()

    async with decisions(ask_models=loaded) as (s, d):
        told = await d.decide(PATH, chat(model="sql"), {})
        assert told["replica"] in s.proxy.backends
        await d.done(told["id"], b"")
        assert (await refused(d.decide(PATH, chat(model="none"), {}))).status == 404
        assert s.idle()


async def test_there_are_only_so_many(monkeypatch):
    monkeypatch.setattr(module, "MOST", 3)
    async with decisions() as (s, d):
        made = [await d.decide(PATH, chat(), {}) for _ in range(3)]
        failure = await refused(d.decide(PATH, chat(), {}))
        assert failure.status == 429 and "POST /decide/ID/done" in failure.message
        await d.done(made[1]["id"], b"")
        assert (await d.decide(PATH, chat(), {}))["id"] not in [one["id"] for one in made]
        assert sum(d.on().values()) == s.proxy.router.ledger.total().requests == 3


async def test_they_are_bounded_in_bytes_too(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 10_000)
    long = chat(messages=[{"role": "user", "content": "word " * 40_000}])
    async with decisions() as (s, d):
        made = await d.decide(PATH, long, {})
        assert "MiB are under way" in (await refused(d.decide(PATH, chat(), {}))).message
        await d.done(made["id"], b"")
        await d.decide(PATH, chat(), {})


async def test_a_gateway_that_stops_decides_nothing():
    async with decisions() as (s, d):
        s.proxy.drain()
        failure = await refused(d.decide(PATH, chat(), {}))
        assert (failure.status, failure.code) == (503, "shutting_down") and s.idle()


@pytest.mark.parametrize(
    ("path", "status"), [("/nope", 404), ("/metrics", 404), ("/sleep", 404), ("", 404), ("/v1/models", 405)]
)
async def test_nothing_is_decided_for_a_path_that_no_client_may_ask(path, status):
    async with decisions() as (s, d):
        assert (await refused(d.decide(path, chat(), {}))).status == status and s.idle()


@pytest.mark.parametrize(
    "usage", [b"null", b'{"prompt_tokens":50}', b'{"prompt_tokens":50,"completion_tokens":-1}', b"7"]
)
async def test_a_usage_that_lacks_something_leaves_nothing(usage):
    async with decisions() as (s, d):
        made = await d.decide(PATH, chat(), {})
        await d.first_byte(made["id"])
        await d.done(made["id"], b'data: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % usage)
        assert s.idle() and not d.on()


async def test_what_is_told_is_learned_from():
    async with decisions(1, policy="least_time") as (s, d):
        (backend,) = s.proxy.backends.values()
        for _ in range(2):
            made = await d.decide(PATH, chat(), {})
            await d.first_byte(made["id"])
            await d.done(made["id"], ANSWER % (made["tokens"], 20, made["cached_tokens"]))
        assert s.metrics.predictions.values == {(backend.id, "equal"): 2}
        assert s.metrics.replica_ttft_seconds.count(backend.id) == 2
        assert backend.candidate.costs.count == 2 and backend.candidate.costs.group.step.count == 2
        assert made["cached_tokens"] > 0 and s.metrics.reported_cached_tokens.total() == made["cached_tokens"]


@pytest.mark.parametrize("answer", [b"", b'{"error": {"message": "out of memory"}}', b'{"usage": null}', b"\x00\xff"])
async def test_of_an_answer_that_tells_nothing_nothing_is_learned(answer):
    async with decisions(1) as (s, d):
        await d.done((await d.decide(PATH, chat(), {}))["id"], answer)
        assert not s.metrics.predictions.values and not s.metrics.prompt_tokens.values and s.idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_is_late_behind_another_proxy_too(stream):
    """Until anything of an answer is told; an end without one says nothing of the replica."""
    async with decisions(replicas=1) as (s, d):
        load = s.proxy.router.ledger.load(next(iter(s.proxy.backends)))
        first, second, third = [(await d.decide(PATH, chat(stream=stream), {}))["id"] for _ in range(3)]
        due = load.due
        assert due < FAR
        await d.done(second, b"")
        assert load.due == due
        await d.done(first, ANSWER % (50, 20, 0))
        assert due < load.due < FAR, "the third is waited for"
        await d.done(third, ANSWER % (50, 20, 0))
        assert load.due == FAR


async def test_a_caller_that_tells_nothing_more_does_not_keep_a_replica_late(monkeypatch):
    """It may have died. Its load counts until the lease ends."""
    monkeypatch.setattr(module, "SILENT", -1e9)  # at once
    async with decisions(replicas=1) as (s, d):
        load = s.proxy.router.ledger.load(next(iter(s.proxy.backends)))
        await d.decide(PATH, chat(), {})
        assert load.due < FAR
        await eventually(lambda: load.due == FAR)
        assert load.requests == 1


async def test_a_caller_is_not_silent_while_nobody_here_reads(monkeypatch):
    """This process did not run: what was told meanwhile, if anything, is not read yet."""
    monkeypatch.setattr(module, "SILENT", 1.0)
    async with decisions(replicas=1) as (s, d):
        s.proxy.pulse.start()
        load = s.proxy.router.ledger.load(next(iter(s.proxy.backends)))
        made = await d.decide(PATH, chat(), {}, lease=1.0)
        time.sleep(module.GRACE + 2.0)
        await asyncio.sleep(2 * module.GRACE)
        assert load.due < FAR
        await d.first_byte(made["id"])
        again = await d.decide(PATH, chat(), {}, lease=0.1)
        await eventually(lambda: load.requests == 1)
        assert (await refused(d.first_byte(again["id"]))).code == "unknown_decision"
        await d.done(made["id"], b"")
        s.proxy.pulse.stop()


async def test_a_rank_is_named_by_its_header_and_a_session_stays():
    async with decisions(6, policy="consistent_hash") as (s, d):
        for rank, backend in enumerate(s.proxy.backends.values()):
            backend.replica.rank = rank
        made = []
        for number in range(4):
            made.append(await d.decide(PATH, chat(f"{number} " * 50), {"x-session-id": "one"}))
            await d.done(made[-1]["id"], b"")
        assert len({one["replica"] for one in made}) == 1
        rank = list(s.proxy.backends).index(made[0]["replica"])
        assert made[0]["headers"] == {"X-data-parallel-rank": str(rank)}
        others = [await d.decide(PATH, chat(), {"x-session-id": str(number)}) for number in range(30)]
        assert len({one["replica"] for one in others}) > 1


async def test_candidates_are_in_the_order_of_the_policy():
    async with decisions(10, policy="least_time") as (s, d):
        first = await d.decide(PATH, chat(), {})
        second = await d.decide(PATH, chat("another " * 50), {}, exclude=(first["replica"],))
        for one in (first, second):
            await d.done(one["id"], b"")
        again = await d.decide(PATH, chat(), {})
        assert again["candidates"][0] == first["replica"] and len(set(again["candidates"])) == module.MOST_CANDIDATES
        await d.decide(PATH, chat("another " * 50), {})
        other = await d.decide(PATH, chat("yet another " * 50), {})
        # The busy ones come last, and ten are too many
        assert not {again["replica"], second["replica"]} & set(other["candidates"])


FORM = (
    b'--cut\r\nContent-Disposition: form-data; name="model"\r\n\r\nranker\r\n'
    b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n--cut--\r\n'
)
PASSED_ON = {
    "rerank": ("/v1/rerank", b'{"model": "ranker", "query": "x"}', "application/json"),
    "in a thread": ("/v1/score", b'{"text": "%b", "model": "ranker"}' % (b"x" * 100_000), "application/json"),
    "a form": ("/v1/audio/transcriptions", FORM % b"wave", "multipart/form-data; boundary=cut"),
}


@asynccontextmanager
async def two_models(**options):
    """The first replica serves "m", the second one "ranker", in a space of its own."""
    async with decisions(1, **options) as (s, d):
        backend_for(s.proxy, 10, ("ranker",)).candidate.space = 3
        s.proxy.changed()
        yield s, d


@pytest.mark.parametrize(("path", "body", "kind"), PASSED_ON.values(), ids=PASSED_ON)
async def test_what_is_passed_on_without_a_look_at_its_prompt_goes_to_replicas_of_its_model(path, body, kind):
    async with two_models() as (s, d):
        for _ in range(3):
            made = await d.decide(path, body, {"content-type": kind})
            assert made["candidates"] == [made["replica"]] == ["127.0.0.1:10"]
            assert "(the prompts of this path are not read)" in made["reason"]
            await d.done(made["id"], b"")
            told = await datapath.explain(s.proxy, path, body, {"content-type": kind})
            assert (told["model"], told["choice"], told["mode"]) == ("ranker", "127.0.0.1:10", "load")
        assert s.idle()


@pytest.mark.parametrize("path", ["/v1/rerank", PATH])
async def test_with_keys_in_force_explain_refuses_what_tenants_may_not_ask(path, monkeypatch):
    body = chat(kv_transfer_params={"do_remote_decode": True})
    async with decisions(1) as (s, d):
        sent = path, body, {"content-type": "application/json"}
        assert (await datapath.explain(s.proxy, *sent))["choice"] == "127.0.0.1:9"
        monkeypatch.setattr(s.proxy.door, "keys", object())
        failure = await refused(datapath.explain(s.proxy, *sent))
        assert (failure.status, failure.code, failure.param) == (400, "field_not_allowed", "kv_transfer_params")
        assert (await d.decide(*sent))["replica"] == "127.0.0.1:9", "its caller asks clients for their keys"


async def test_of_a_model_that_nobody_serves_nothing_is_decided_on_any_path():
    asks = AsyncMock()
    async with two_models(ask_models=asks) as (s, d):
        for path in ("/v1/rerank", PATH):
            failure = await refused(d.decide(path, chat(model="nobody"), {"content-type": "application/json"}))
            assert (failure.status, failure.code) == (404, "model_not_found")
        assert asks.called and s.idle()
        failure = await refused(datapath.explain(s.proxy, "/v1/rerank", chat(model="nobody"), {}))
        assert failure.code == "model_not_found"


async def test_of_a_model_that_nobody_serves_nothing_is_decided_where_all_serve_the_same():
    async with decisions(1) as (s, d):
        failure = await refused(d.decide("/v1/rerank", chat(model="nobody"), {"content-type": "application/json"}))
        assert (failure.status, failure.code) == (404, "model_not_found") and s.idle()
