"""Exchanges as traces: what a real collector gets of requests that go well, fail, retry, stream and are left, and what
replicas are told."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

import pytest

from gateway.ops import spans as module
from gateway.ops.spans import Spans
from gateway.prompt.pipeline import Pipeline
from gateway.proxy.observers.traces import Traces
from replicas.simulated.model import sim_model_dir

from ..collector import collecting
from ..http.talk import eventually, free_port, read_request
from .legs import HANDED, give_roles
from .replies import BODY, ENDS, EVENT, LONG, NEXT, SSE_HEAD, USAGE, answers, chunk, post, reply, says, silent, streams
from .stack import stack

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traceparent(flags="01", version="00"):
    return f"{version}-{TRACE}-{PARENT}-{flags}".encode()


def told_of(head: bytes) -> list[bytes]:
    """The traceparent headers a replica got."""
    return re.findall(rb"^traceparent: (.*)\r$", head, re.M)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine the last spans may take longer than an operator would wait."""
    monkeypatch.setattr(module, "FLUSH_SECONDS", 30.0)


@asynccontextmanager
async def traced(monkeypatch, *scripts, env=None, **options):
    """A stack with traces; all spans are there once `await collected()` returns."""
    async with collecting() as collector:
        for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **(env or {})}.items():
            monkeypatch.setenv(name, value)
        spans = Spans()

        async with stack(*scripts, traces=Traces(spans, "round_robin"), **options) as made:

            async def collected():
                await eventually(made.idle)
                await asyncio.to_thread(spans.close)
                return collector

            made.collected = collected
            yield made
        await asyncio.to_thread(spans.close)


async def spans_of(monkeypatch, *scripts, ask=(post(),), **options):
    """What is sent to the collector of these requests: the spans of clients' requests, those of attempts, and what the
    clients were answered."""
    async with traced(monkeypatch, *scripts, **options) as made:
        answered = [await made.ask(request) for request in ask]
        collector = await made.collected()
    return collector.of("SERVER"), collector.of("CLIENT"), answered


async def test_a_request_is_a_span_with_its_attempt_below_it(monkeypatch):
    seen = []
    async with traced(monkeypatch, answers(USAGE, seen=seen)) as made:
        status, headers, _ = await made.ask(post())
        collector = await made.collected()
        replica = next(iter(made.proxy.backends.values()))
    assert status == 200
    (server,), (client,) = collector.of("SERVER"), collector.of("CLIENT")
    assert server.name == client.name == "POST /v1/chat/completions"
    assert server.parent == "" and client.parent == server.id and client.trace == server.trace
    assert server.begun <= client.begun <= client.ended <= server.ended
    assert server.told == {
        "http.request.method": "POST", "url.scheme": "http", "url.path": "/v1/chat/completions", "http.route": "/v1/chat/completions",
        "server.address": "client.example", "http.response.status_code": 200, "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 1,
        "hitherto.outcome": "complete", "hitherto.request_id": headers["x-request-id"],
    }  # fmt: skip
    predicted = client.told.pop("hitherto.ttft.predicted")
    assert predicted > 0
    assert client.told == {
        "http.request.method": "POST", "url.full": f"{replica.replica.url}/v1/chat/completions", "server.address": "127.0.0.1",
        "server.port": replica.replica.port, "http.response.status_code": 200, "hitherto.replica": replica.id, "hitherto.policy": "round_robin",
        "hitherto.cached_tokens.predicted": 0, "hitherto.cached_tokens.observed": 0,
    }  # fmt: skip
    assert [name for name, _, _ in server.events] == ["prepared", "chosen"]
    assert server.events[1][1:] == (client.begun, {"hitherto.replica": replica.id})
    assert [name for name, _, _ in client.events] == ["sent", "first_byte"]
    times = [server.begun, server.events[0][1], *(at for _, at, _ in client.events), client.ended]
    assert times == sorted(times)
    assert not server.failed and not client.failed
    assert server.resource["service.name"] == "hitherto"
    assert told_of(seen[0][0]) == [f"00-{client.trace}-{client.id}-01".encode()]


async def test_a_clients_trace_goes_on_through_the_gateway(monkeypatch):
    seen = []
    asked = post(extra=b"traceparent: " + traceparent() + b"\r\ntracestate: a=1\r\ntracestate: b=2\r\n")
    (server,), (client,), _ = await spans_of(monkeypatch, answers(seen=seen), ask=[asked])
    assert (server.trace, server.parent) == (TRACE, PARENT)
    assert (client.trace, client.parent) == (TRACE, server.id)
    assert server.state == client.state == "a=1,b=2"
    assert told_of(seen[0][0]) == [f"00-{TRACE}-{client.id}-01".encode()]
    assert seen[0][0].count(b"tracestate: a=1\r\ntracestate: b=2\r\n") == 1


async def test_what_the_client_does_not_sample_is_not_sent_and_its_header_stays(monkeypatch):
    seen = []
    asked = post(extra=b"traceparent: " + traceparent("00") + b"\r\ntracestate: a=1\r\n")
    assert (await spans_of(monkeypatch, answers(seen=seen), ask=[asked]))[:2] == ([], [])
    assert told_of(seen[0][0]) == [traceparent("00")] and b"tracestate: a=1\r\n" in seen[0][0]


async def test_what_we_do_not_sample_the_replica_does_not_either(monkeypatch):
    seen = []
    env = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    asked = [post(), post(extra=b"traceparent: " + traceparent() + b"\r\n")]
    servers, clients, _ = await spans_of(monkeypatch, answers(seen=seen), ask=asked, env=env)
    assert {span.trace for span in servers + clients} == {TRACE}  # its parent is sampled
    (unsampled,), (sampled,) = told_of(seen[0][0]), told_of(seen[1][0])
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-00", unsampled) and sampled.endswith(b"-01")


@pytest.mark.parametrize(
    "header",
    [b"traceparent: " + traceparent(version="ff"), b"traceparent: nonsense", b"traceparent: 00-" + b"0" * 32 + b"-b7ad6b7169203331-01",
     b"traceparent: " + traceparent().upper(), b"traceparent: " + traceparent() + b"\r\ntraceparent: " + traceparent("00")],
    ids=["version", "nonsense", "zero", "upper case", "two"],
)  # fmt: skip
async def test_a_header_that_is_not_valid_begins_a_new_trace(monkeypatch, header):
    seen = []
    asked = post(extra=header + b"\r\ntracestate: a=1\r\n")
    (server,), (client,), _ = await spans_of(monkeypatch, answers(seen=seen), ask=[asked])
    assert server.parent == "" and server.trace != TRACE and server.state == ""
    assert told_of(seen[0][0]) == [f"00-{server.trace}-{client.id}-01".encode()]
    assert b"tracestate" not in seen[0][0]  # it belongs to the header that was not valid


async def test_a_retry_is_a_second_attempt_and_says_why(monkeypatch):
    first, second = [], []
    full = answers(status=b"503 Service Unavailable", seen=first)
    (server,), (failed, went), _ = await spans_of(monkeypatch, full, answers(USAGE, seen=second))
    assert failed.parent == went.parent == server.id
    assert (failed.told["http.response.status_code"], failed.told["error.type"], failed.failed) == (503, "503", True)
    assert "http.request.resend_count" not in failed.told and "hitherto.cached_tokens.observed" not in failed.told
    assert (went.told["http.request.resend_count"], went.told["hitherto.retry_reason"]) == (1, "status 503")
    assert not went.failed
    assert failed.told["hitherto.replica"] != went.told["hitherto.replica"]
    assert (server.told["http.response.status_code"], server.failed) == (200, False)
    assert [name for name, _, _ in server.events] == ["prepared", "chosen", "chosen"]
    assert [told_of(head)[0].split(b"-")[2].decode() for head, _ in first + second] == [failed.id, went.id]


async def test_both_legs_are_attempts_that_name_each_other(monkeypatch):
    async with traced(monkeypatch, answers(HANDED), streams(chunk(EVENT), chunk(EVENT))) as made:
        give_roles(made, "prefill", "decode")
        await made.ask(post(LONG.replace(b"{", b'{"stream": true, ', 1)))
        collector = await made.collected()
    (server,), legs = collector.of("SERVER"), collector.of("CLIENT")
    assert [leg.told["hitherto.leg"] for leg in legs] == ["prefill", "decode"]
    ids = [leg.told["hitherto.replica"] for leg in legs]
    for span in (server, *legs):
        assert [span.told[f"hitherto.legs.{leg}"] for leg in ("prefill", "decode")] == ids
        assert span.told["hitherto.legs.moved_tokens"] > 16 and span.told["hitherto.legs.transfer.predicted"] > 0.01
        assert span.told["hitherto.legs.transfer.observed"] >= 0


async def test_an_attempt_without_a_connection(monkeypatch):
    (server,), (client,), [(status, *_)] = await spans_of(monkeypatch, ports=(free_port(),), retries=0)
    assert (client.told["error.type"], client.failed, client.events) == ("connect", True, [])
    assert "no connection to" in client.message and "http.response.status_code" not in client.told
    assert status == server.told["http.response.status_code"] == 503
    assert (server.told["error.type"], server.told["hitherto.outcome"]) == ("503", "refused")
    assert server.failed and "no replica answered after 1 attempt" in server.message


async def test_nobody_to_ask(monkeypatch):
    (server,), attempts, [(status, *_)] = await spans_of(monkeypatch)
    assert not attempts and status == server.told["http.response.status_code"] == 503
    assert server.failed and [name for name, _, _ in server.events] == ["prepared"]


async def test_the_clients_own_fault_is_no_error_of_the_gateway(monkeypatch):
    refuses = answers(b'{"error":{}}', status=b"400 Bad Request")
    (ours, theirs), (client,), _ = await spans_of(monkeypatch, refuses, ask=[post(b"not json"), post()])
    assert [span.told["http.response.status_code"] for span in (ours, theirs)] == [400, 400]
    assert not ours.failed and not theirs.failed
    # to the one who asked, it failed
    assert client.parent == theirs.id and (client.failed, client.told["error.type"]) == (True, "400")


async def test_a_stream_that_breaks_is_a_failed_span_with_status_200(monkeypatch):
    breaks = streams(chunk(EVENT), chunk(EVENT), end=None)
    (server,), (client,), _ = await spans_of(monkeypatch, breaks)
    for span in (server, client):
        assert (span.told["http.response.status_code"], span.told["error.type"], span.failed) == (200, "closed", True)
    assert server.told["hitherto.outcome"] == "cut"
    assert client.told["hitherto.ttft.observed"] > 0


async def test_a_client_that_leaves(monkeypatch):
    asked = asyncio.Event()
    async with traced(monkeypatch, says(asked.set)) as made:
        talker = await made.say(post())
        await asked.wait()
        await talker.close()
        collector = await made.collected()
    (server,), (client,) = collector.of("SERVER"), collector.of("CLIENT")
    assert server.told["hitherto.outcome"] == "aborted"
    for span in (server, client):
        assert not span.failed and "http.response.status_code" not in span.told
    assert [name for name, _, _ in client.events] == ["sent"] and client.ended <= server.ended


async def test_no_byte_in_time(monkeypatch):
    (server,), (client,), [(status, *_)] = await spans_of(monkeypatch, silent, request_timeout=0.2)
    assert status == server.told["http.response.status_code"] == 504
    assert (client.told["error.type"], client.failed) == ("timeout", True)


async def test_a_kept_connection_that_died_is_an_attempt_of_its_own(monkeypatch):
    """The replica closes it under the second request, which goes to the same replica on a fresh one."""
    async with traced(monkeypatch, says(reply(), NEXT, then_hangs=False)) as made:
        await made.answered(2, post())
        collector = await made.collected()
    _, died, went = collector.of("CLIENT")
    assert died.trace == went.trace and died.told["hitherto.replica"] == went.told["hitherto.replica"]
    assert (died.told["error.type"], died.failed) == ("closed", True)
    assert (went.told["hitherto.retry_reason"], went.told["http.request.resend_count"]) == ("closed", 1)


async def test_what_is_not_read_for_its_prompt_has_a_span_without_tokens_or_path_in_its_name(monkeypatch):
    own = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"  # the gateway's: no span
    asked = [b"GET /version?key=secret HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n", own]
    (server,), (client,), _ = await spans_of(monkeypatch, answers(), ask=asked)
    assert server.name == client.name == "GET" and "http.route" not in server.told
    assert server.told["url.path"] == "/version" and client.told["url.full"].endswith("/version")
    assert (server.told["server.address"], server.told["server.port"]) == ("[::1]", 8080)
    assert not [name for name in server.told if name.startswith("gen_ai")]
    assert not any(b"secret" in span.raw for span in (server, client))


async def test_a_port_that_no_collector_could_hold_is_not_told(monkeypatch):
    asked = b"GET /version HTTP/1.1\r\nHost: x:" + b"9" * 900 + b"\r\n\r\n"
    (server,), _, _ = await spans_of(monkeypatch, answers(), ask=[asked])
    assert "server.port" not in server.told and len(server.told["server.address"]) <= 1000


async def test_no_word_of_prompt_or_answer_leaves(monkeypatch):
    said = [b"Ozymandias", b"trunkless"]
    body = BODY.replace(b"hi", said[0])[:-1] + b', "user": "%b"}' % said[0]
    stream = streams(chunk(b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % said[1]), end=None)
    broken = says(b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n" % said[1])
    fails = answers(said[1], status=b"500 Internal Server Error")
    async with traced(monkeypatch, stream, broken, fails, retries=0) as made:
        for _ in range(3):
            talker = await made.say(post(body))
            await talker.until(b"\r\n\r\n")
        await made.ask(post(body[:-1]))
        collector = await made.collected()
    assert len(collector.of("SERVER")) == 4
    assert not [word for word in said for span in collector.spans if word in span.raw]


async def test_names_that_no_text_can_hold_do_not_stop_the_rest(monkeypatch):
    """A lone surrogate fails the encoding of the whole batch."""
    odd = post(BODY.replace(b'"m"', b'"\\ud800"'), extra=b"x-request-id: \xff\xfe\r\n")
    servers, _, _ = await spans_of(monkeypatch, answers(), ask=[odd, post()])
    assert sorted(span.told["http.response.status_code"] for span in servers) == [200, 404]


async def test_a_streams_times(monkeypatch):
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}).encode()
    stream = streams(chunk(EVENT), chunk(usage))
    (server,), (client,), _ = await spans_of(monkeypatch, stream, ask=[post(body)])
    (_, sent, _), (_, first, _) = client.events
    assert client.told["hitherto.ttft.observed"] == pytest.approx((first - sent) / 1e9, abs=1e-6)
    assert (server.told["gen_ai.usage.input_tokens"], server.told["gen_ai.usage.output_tokens"]) == (7, 3)


@pytest.mark.parametrize("env", [{}, {"OTEL_TRACES_SAMPLER": "always_off"}], ids=["sampled", "not sampled"])
async def test_requests_of_one_connection_are_traces_of_their_own(monkeypatch, env):
    """What is known of a head that a client repeats has nothing of the trace before."""
    seen = []
    async with traced(monkeypatch, answers(seen=seen), env=env) as made:
        talker = await made.talk()
        # The second is parsed with a connection at hand, the third known
        for extra in (b"", b"x-a: b\r\n", b"x-a: b\r\n"):
            assert (await talker.ask(post(extra=extra)))[0] == 200
        collector = await made.collected()
    told = [told_of(head) for head, _ in seen]
    assert all(len(one) == 1 for one in told) and len({one.split(b"-")[1] for (one,) in told}) == 3
    assert len(collector.spans) == (0 if env else 6) and not any(span.parent for span in collector.of("SERVER"))


async def test_the_ttft_that_was_predicted_is_told_and_not_what_was_learned_since(monkeypatch):
    """An answer that takes longer than predicted teaches another cost before its span is written."""
    predicted = []

    async def slow(reader, writer):
        await read_request(reader)
        predicted.extend(exchange.attempt.placement.ttft for exchange in made.proxy.exchanges)
        await asyncio.sleep(0.2)
        writer.write(SSE_HEAD + chunk(EVENT) + ENDS)

    async with traced(monkeypatch, slow, pipeline=Pipeline(sim_model_dir(), "m", 16)) as made:
        await made.ask(post({**json.loads(LONG), "stream": True}))
        (client,) = (await made.collected()).of("CLIENT")
    assert client.told["hitherto.ttft.predicted"] == pytest.approx(predicted[0], rel=1e-3)
    assert client.told["hitherto.ttft.observed"] > 2 * predicted[0]
