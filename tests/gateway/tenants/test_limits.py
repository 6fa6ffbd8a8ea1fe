"""What tenants may have: refused beyond it, in their client's format, and given back on every end of a request."""

import asyncio
import hashlib
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import datapath
from gateway.ops.metrics import Metrics
from gateway.prompt.pipeline import Pipeline
from gateway.proxy.admission.overload import Overload
from gateway.tenants import limits as rules
from gateway.tenants.ending import Settled
from gateway.tenants.keys import Keys
from gateway.tenants.metering import MOST_GONE, Metering
from gateway.tenants.tenant import Tenant
from policies import Classes, Rules
from replicas import Replica, State
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually, read_request
from ..proxy.replies import BODY, EVENT, SSE_HEAD, answers, chunk, post, says, silent, streams
from ..proxy.stack import stack

TEN_TO_THE_MINUTE = datetime(2026, 11, 30, 23, 59, 50, tzinfo=UTC).timestamp()


def answer(prompt=20, completion=5) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return json.dumps({"choices": [{"index": 0, "message": {"content": "hi"}}], "usage": usage}).encode()


class Clock:
    now = TEN_TO_THE_MINUTE

    def __call__(self) -> float:
        return self.now


class Tenants:
    """A proxy whose tenants have these limits; `ask` as one of them."""

    def __init__(self, s, metering, clock):
        self.stack, self.metering, self.clock = s, metering, clock

    def account(self, name="a"):
        return self.metering.account(name)

    async def begin(self, name="a", body=BODY, path=b"/v1/chat/completions", header=b""):
        return await self.stack.say(post(body, path, b"Authorization: Bearer %b\r\n%b" % (name.encode(), header)))

    async def ask(self, *args, **options):
        return await (await self.begin(*args, **options)).response()

    async def ended(self, *args, **options):
        """The answer to a request, once what it cost is counted."""
        answer = await self.ask(*args, **options)
        await eventually(self.stack.idle)
        return answer

    def counted(self, kind, name="a"):
        """What the tenant has had of this kind in the present window."""
        return self.account(name).own.get(kind, rules.window(kind, self.clock.now))


@asynccontextmanager
async def tenants(tmp_path, *scripts, a=None, b=None, notes=(), **options):
    file = tmp_path / "keys.yaml"
    entries = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **(fields or {})} for name, fields in (("a", a), ("b", b))]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, entries)))
    clock = Clock()
    metrics, keys = Metrics(), Keys(file)
    metering = Metering(clock, metrics.tenant_refusals.inc)
    ended = Settled(metering, metrics, keys.names)
    async with stack(*scripts, keys=keys, metering=metering, on_end=(ended, *notes), metrics=metrics, **options) as s:
        yield Tenants(s, metering, clock)
        await eventually(s.idle)
        assert all(account.running == 0 for account in metering.accounts())


async def test_requests_per_minute_and_what_the_client_is_told(tmp_path):
    async with tenants(tmp_path, answers(), a={"requests_per_minute": 3}, b={"requests_per_minute": 1}) as t:
        left = [(await t.ask())[1]["x-ratelimit-remaining-requests"] for _ in range(3)]
        assert left == ["2", "1", "0"]
        status, headers, body = await t.ask()
        assert (status, headers["retry-after"]) == (429, "10")
        assert headers["x-ratelimit-limit-requests"] == "3" and headers["x-ratelimit-remaining-requests"] == "0"
        assert headers["x-ratelimit-reset-requests"] == "10s"
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "3 requests per minute" in error["message"]
        assert (await t.ask("b"))[0] == 200  # another's count is another's
        status, headers, body = await t.ask("b", path=b"/v1/messages")
        assert (status, json.loads(body)["error"]["type"]) == (429, "rate_limit_error") and "retry-after" in headers
        metrics = t.stack.metrics
        assert metrics.rejections.values["429",] == 2
        assert metrics.tenant_refusals.values == {("a", "requests"): 1, ("b", "requests"): 1}
        await eventually(lambda: metrics.tenant_requests.values["b", "2xx"] == 1)
        assert metrics.tenant_requests.values == {("a", "2xx"): 3, ("a", "4xx"): 1, ("b", "2xx"): 1, ("b", "4xx"): 1}
        t.clock.now += 10
        assert (await t.ask())[0] == 200


async def test_the_access_log_says_which_limit_refused_a_request(tmp_path, caplog):
    caplog.set_level("INFO", "hitherto.access")
    async with tenants(tmp_path, answers(), a={"requests_per_minute": 1}, notes=[datapath._access]) as t:
        assert [(await t.ask())[0] for _ in range(2)] == [200, 429]
    told = [record.fields for record in caplog.records if record.name == "hitherto.access"]
    assert [(one["tenant"], one["outcome"], one["reason"], one["limit"]) for one in told] == [
        ("a", "complete", None, None),
        ("a", "refused", "rate_limit_exceeded", "requests per minute"),
    ]


async def test_what_the_gateway_has_no_place_for_is_given_back_and_its_client_told_what_is_left(tmp_path):
    overload = Overload(Classes(), Rules(engine_wait=0.0, max_wait=0.05), None)
    a = {"requests_per_minute": 3, "input_tokens_per_minute": 1000}
    async with tenants(tmp_path, silent, a=a, overload=overload) as t:
        first = await t.begin()
        await eventually(lambda: t.stack.proxy.router.ledger.total().requests)
        for _ in range(3):
            status, headers, body = await t.ask()
            assert (status, json.loads(body)["error"]["code"]) == (429, "overloaded")
            assert headers["x-ratelimit-remaining-requests"] == "2" and "x-ratelimit-limit-input-tokens" in headers
        # With limits of its own a tenant does not get round its requests per minute.
        slo = [json.loads((await t.ask(header=b"x-hitherto-slo: ttft=1ms\r\n"))[2])["error"]["code"] for _ in range(3)]
        assert slo == ["overloaded", "overloaded", "rate_limit_exceeded"]
        t.stack.proxy.refuse_unanswered()  # an engine has it: it counts
        assert (await first.response())[1]["x-ratelimit-remaining-requests"] == "0"
        t.clock.now += 60
        for backend in t.stack.proxy.backends.values():
            backend.replica.state = State.FAILED
        t.stack.proxy.changed()
        assert [(await t.ask())[0] for _ in range(4)] == [503] * 4


async def test_who_asks_for_models_that_nobody_knows_does_not_go_round_its_requests_per_minute(tmp_path):
    """One that is away counts as little as any that the gateway has no place for: it is no choice of the tenant's."""
    replicas = {}
    a = {"requests_per_minute": 2}
    async with tenants(tmp_path, answers(), a=a, b=a, replicas=replicas) as t:
        replicas["late"] = Replica("127.0.0.1:9", "http://127.0.0.1:9", "127.0.0.1", 9, state=State.WARMING)
        replicas["away"] = replace(replicas["late"], id="127.0.0.1:10", models={"other": None}, required_model="away")

        async def codes(name, *models):
            said = [await t.ask(name, BODY.replace(b'"m"', b'"%b"' % model)) for model in models]
            return [(status, json.loads(body).get("error", {}).get("code")) for status, _, body in said]

        unknown, away = (503, "model_not_known"), (503, "no_replica_ready")
        assert await codes("a", b"x", b"away", b"away", b"x", b"m") == [
            unknown, away, away, unknown, (429, "rate_limit_exceeded"),
        ]  # fmt: skip
        assert await codes("b", b"m") == [(200, None)]


def test_a_request_that_ends_without_a_place_before_its_claim_is_decided_does_not_count():
    metering, later = Metering(Clock()), []

    class Redis:
        joined = True

        def claim(self, account, wanted, decide):
            later.append(decide)

        def charge(self, *_):
            pass

    class Pending:
        over = None

    metering.shared = Redis()
    charge = metering.charge(Tenant("a", None, None, rules.Limits(requests_per_minute=3), None), 0)
    metering.claim(charge, lambda error: pytest.fail("it has ended"))
    metering.settle(charge, 0, 0, unserved=True)
    metering.account("a").take(charge.wanted)  # as Redis has
    later.pop()(Pending, True)
    assert metering.account("a").own.get("requests", rules.window("requests", Clock.now)) == 0


async def test_input_tokens_are_claimed_before_and_counted_as_the_engine_counts_them(tmp_path):
    pipeline = Pipeline(sim_model_dir(), "m", 16)
    tokens = pipeline.prepare("/v1/chat/completions", BODY).tokens
    async with tenants(tmp_path, answers(answer(tokens + 7)), pipeline=pipeline, a={"input_tokens_per_minute": 3 * tokens + 7}) as t:  # fmt: skip
        assert (await t.ask())[0] == 200
        await eventually(lambda: t.counted("input") == tokens + 7)
        status, headers, _ = await t.ask()
        assert status == 200 and headers["x-ratelimit-remaining-input-tokens"] == f"{tokens}"
        await eventually(lambda: t.account().running == 0)
        status, headers, body = await t.ask()  # 2 x 7 more than was claimed
        assert status == 429 and "input tokens per minute" in json.loads(body)["error"]["message"]
    async with tenants(tmp_path, answers(), pipeline=pipeline, a={"input_tokens_per_minute": tokens - 1}) as t:
        status, headers, body = await t.ask()
        assert (status, json.loads(body)["error"]["code"]) == (429, "request_too_large")
        assert "retry-after" not in headers and headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "field, limit", [("tokens_per_day", 50), ("tokens_per_month", 50), ("output_tokens_per_minute", 10)]
)
async def test_tokens_count_when_they_are_there_and_until_their_window_ends(tmp_path, field, limit):
    """A budget is of input and output together."""
    async with tenants(tmp_path, answers(answer(20, 5)), a={field: limit}) as t:
        for _ in range(2):
            assert (await t.ended())[0] == 200
        status, headers, body = await t.ask()
        error, is_budget = json.loads(body)["error"], field != "output_tokens_per_minute"
        assert (status, error["code"]) == (429, "insufficient_quota" if is_budget else "rate_limit_exceeded")
        assert (error["type"] == "insufficient_quota") == (headers.get("x-should-retry") == "false") == is_budget
        assert headers["retry-after"] == "10" and (is_budget or headers["x-ratelimit-remaining-output-tokens"] == "0")
        t.clock.now += 10  # it is the last day of a month
        assert (await t.ask())[0] == 200


async def broken(reader, writer):
    await read_request(reader)


async def cut(reader, writer):
    await read_request(reader)
    writer.write(SSE_HEAD + chunk(EVENT))
    await writer.drain()


@pytest.mark.parametrize(
    "name, scripts, status",
    [
        ("complete", [answers(answer())], 200),
        ("retried", [broken, broken], 502),
        ("retried with success", [broken, answers(answer())], 200),
        ("refused by the engine", [answers(b'{"error": {"message": "no"}}', b"400 Bad Request")], 400),
        ("failed", [answers(b"{}", b"500 Internal Server Error")], 500),
        ("no answer in time", [silent], 504),
        ("cut in mid-stream", [cut], 200),
        ("nobody there", [], 503),
    ],
)
async def test_what_runs_is_given_back_however_it_ends(tmp_path, name, scripts, status):
    async with tenants(
        tmp_path, *scripts, a={"concurrent_requests": 1, "tokens_per_day": 10**6}, request_timeout=0.5
    ) as t:
        body = BODY.replace(b"{", b'{"stream": true,', 1) if name.startswith("cut") else BODY
        for _ in range(2):
            talk = await t.begin(body=body)
            head = await talk.until(b"\r\n\r\n")
            assert int(head.split()[1]) == status
            await eventually(lambda: t.account().running == 0)
        spent = t.counted("day")
        assert (spent > 0) == (status == 200)


async def test_concurrent_requests_are_bounded_and_one_whose_client_leaves_makes_room(tmp_path):
    async with tenants(tmp_path, silent, answers(answer()), a={"concurrent_requests": 1}, policy="round_robin") as t:
        first = await t.begin()
        await eventually(lambda: t.account().running == 1)
        status, headers, body = await t.ask()
        assert (status, headers["retry-after"]) == (429, "1")
        assert "1 concurrent requests" in json.loads(body)["error"]["message"]
        assert t.account().running == 1
        await first.close()
        await eventually(lambda: t.account().running == 0)
        assert (await t.ask())[0] == 200


@given(st.floats(0, 4e9), st.sampled_from([rules.REQUESTS, rules.DAY, rules.MONTH]))
def test_windows_follow_each_other_without_a_gap(now, kind):
    left = rules.seconds_left(kind, now)
    assert 0 < left <= {rules.REQUESTS: 60, rules.DAY: 86_400, rules.MONTH: 31 * 86_400}[kind]
    assert rules.window(kind, now + left + 0.001) == rules.window(kind, now) + 1


@pytest.mark.parametrize(("path", "counted"), [(b"/invocations", True), (b"/v1/messages/count_tokens", False)])
async def test_a_prompt_that_is_not_read_and_of_which_nobody_tells_costs_by_its_size(tmp_path, path, counted):
    """Else budgets would end where a client streams from one of these paths and asks for no usage."""
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": 400 * "x"}]}).encode()
    async with tenants(tmp_path, streams(chunk(EVENT)), a={"input_tokens_per_minute": 150}) as t:
        assert (await t.ended(body=body, path=path))[0] == 200
        count = t.counted("input")
        assert count == (len(body) // 4 if counted else 0)
    async with tenants(tmp_path, answers(answer(7)), a={"input_tokens_per_minute": 150}) as t:
        assert (await t.ended(body=body, path=path))[0] == 200
        assert t.counted("input") == 7


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/rerank"])
async def test_who_leaves_while_engines_are_asked_for_its_model_claims_nothing(tmp_path, path):
    asked, answered = asyncio.Event(), asyncio.Event()

    async def ask_models():
        asked.set()
        await answered.wait()

    limits = {"concurrent_requests": 1, "requests_per_minute": 5, "models": ["m", "new"]}
    async with tenants(tmp_path, answers(answer()), a=limits, ask_models=ask_models) as t:
        talk = await t.begin(body=BODY.replace(b'"m"', b'"new"'), path=path)
        await asked.wait()
        await talk.close()
        await eventually(lambda: not t.stack.proxy.exchanges)
        answered.set()
        await eventually(lambda: not t.stack.proxy.preparation._in_background)
        assert t.account().running == 0
        assert t.counted("requests") == 0
        assert (await t.ask())[0] == 200


FAILED = b'data: {"error": {"message": "no", "type": "InternalServerError", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/invocations"])
@pytest.mark.parametrize("before", [False, True])
async def test_a_stream_that_ends_with_an_error_costs_the_tokens_before_it(tmp_path, path, before):
    """vLLM's is two events: the error, and what ends each stream."""
    script = says(SSE_HEAD + chunk(FAILED) + chunk(DONE) + b"0\r\n\r\n")
    if before:
        script = streams(chunk(3 * EVENT), chunk(FAILED), pause=lambda: asyncio.sleep(0.1))
    async with tenants(tmp_path, script, a={"output_tokens_per_minute": 10**6}) as t:
        assert (await t.ended(body=BODY.replace(b"{", b'{"stream": true,', 1), path=path))[0] == 200
        assert (t.counted("output") >= 3) == before
        assert t.stack.metrics.tenant_requests.values["a", "5xx"] == 1


@pytest.mark.parametrize("jump", [-3600, -40 * 86_400, 3600])
def test_limits_are_of_a_minute_whatever_the_machines_clock_is_set_to(jump):
    """An hour that comes twice neither goes by unlimited, nor is it refused as a whole."""
    clock, since = [TEN_TO_THE_MINUTE, 0.0], [0.0]
    metering = Metering(wall=lambda: clock[0] + since[0], running=lambda: since[0])
    tenant = Tenant("a", limits=rules.Limits(requests_per_minute=3, tokens_per_day=1000))

    def admitted() -> int:
        errors: list = []
        for _ in range(5):
            metering.claim(metering.charge(tenant, 10), errors.append)
        return errors.count(None)

    assert admitted() == 3
    clock[0] += jump
    assert admitted() == (3 if jump > 0 else 0)
    for _ in range(3):
        since[0] += 60
        assert admitted() == 3


def test_a_tenant_that_is_taken_out_and_put_back_has_had_what_it_had():
    metering = Metering(Clock())
    tenant = Tenant("a", None, None, rules.Limits(tokens_per_day=100), None)

    def ask(tokens):
        decided, charge = [], metering.charge(tenant, tokens)
        metering.claim(charge, decided.append)
        return decided[0]

    assert ask(80) is None
    metering.forget("a")
    assert metering.running() == {}
    assert ask(30).status == 429 and ask(20) is None
    for number in range(3 * MOST_GONE):
        metering.account(str(number))
        metering.forget(str(number))
    assert len(metering._gone) == MOST_GONE and metering.running() == {"a": 2}
