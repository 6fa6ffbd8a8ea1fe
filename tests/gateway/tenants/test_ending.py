"""What a tenant pays for: what was used, once, however it ends, and no more than was asked for."""

import asyncio
import json
from collections import Counter

import pytest

from gateway.prompt.pipeline import Pipeline
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually, read_request
from ..proxy.replies import BODY, EVENT, SSE_HEAD, answers, chunk, reply, silent, streams
from .test_limits import tenants

A_MONTH = {"tokens_per_month": 10**6}
HUGE = 10**17


def spent(t, name="a"):
    """Tokens that the metrics say a tenant has had, by kind, and what its month says."""
    counted = Counter()
    for (tenant, kind), tokens in t.stack.metrics.tenant_tokens.values.items():
        counted[kind] += tokens if tenant == name else 0
    ((_, _, month),) = [one for one in t.account(name).own.items() if one[0] == "month"]
    assert month == counted["input"] + counted["output"]
    return counted["input"], counted["output"]


def response(id, usage, status="completed", **fields):
    return json.dumps(
        {"id": id, "object": "response", "status": status, "output": [], "usage": usage, **fields}
    ).encode()


class Stores:
    """An engine that answers at once where a response is made in the background, and tells its usage when it is asked
    for one that is `done`."""

    def __init__(self):
        self.made, self.done, self.numbers = 0, False, {}

    async def script(self, reader, writer):
        while True:
            head, body = await read_request(reader)
            method, target = head.split()[:2]
            if method == b"POST" and target == b"/v1/responses":
                self.made += 1
                usage = None if b'"background"' in body else self.usage(self.made)
                id = json.loads(body).get("request_id", f"resp_{self.made}")
                self.numbers[id] = self.made
                writer.write(reply(response(id, usage, "queued" if usage is None else "completed")))
                continue
            id = target.split(b"/")[3].partition(b"?")[0].decode()
            number = self.numbers.get(id) or int(id.removeprefix("resp_"))
            usage = self.usage(number) if self.done else None
            told = response(id, usage, metadata={"usage": '"usage": {"input_tokens": 7}'})
            if b"stream=true" in target:
                event = b'event: response.completed\ndata: {"type":"response.completed","response":%b}\n\n' % told
                writer.write(SSE_HEAD + chunk(event) + b"0\r\n\r\n")
            else:
                writer.write(reply(told))

    @staticmethod
    def usage(number):
        return {"input_tokens": 40, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 100 * number}


async def get(t, path, name="a", method=b"GET"):
    length = b"Content-Length: 0\r\n" if method == b"POST" else b""
    return await t.stack.ask(
        b"%b %b HTTP/1.1\r\nHost: x\r\n%bAuthorization: Bearer %b\r\n\r\n" % (method, path, length, name.encode())
    )


def create(**fields):
    return {"body": json.dumps({"model": "m", "input": "hi " * 8, **fields}).encode(), "path": b"/v1/responses"}


async def test_a_response_is_paid_for_once_whoever_tells_of_it(tmp_path):
    engine = Stores()
    async with tenants(tmp_path, engine.script, a=A_MONTH, b=A_MONTH) as t:
        await t.ended(**create(background=True))
        input, output = spent(t)
        assert 0 < input < 40 and output == 0, "by the gateway's own tokens, and nothing is written yet"
        await get(t, b"/v1/responses/resp_1")
        engine.done = True
        for path in (b"/v1/responses/resp_1", b"/v1/responses/resp_1?stream=true", b"/v1/responses/resp_1/input_items"):
            for _ in range(2):
                assert (await get(t, path))[0] == 200
                await eventually(t.stack.idle)
                assert spent(t) == (40, 100)
        await t.ask(**create())
        await get(t, b"/v1/responses/resp_2/cancel", method=b"POST")
        await get(t, b"/v1/responses/resp_2?stream=true")
        await eventually(t.stack.idle)
        assert spent(t) == (80, 300)
        await get(t, b"/v1/responses/resp_7", "b")  # made by way of another gateway, so that nobody here counted it
        await get(t, b"/v1/responses/resp_7", "b")
        await eventually(t.stack.idle)
        assert spent(t, "b") == (40, 700)


@pytest.mark.parametrize("id", ["resp_free", "my-own.id:1"])
async def test_each_response_is_paid_for_though_all_bear_one_id(tmp_path, id):
    """vLLM takes the client's `request_id` for the id, whoever has used it before."""
    engines = [Stores(), Stores()]
    async with tenants(tmp_path, *(one.script for one in engines), a=A_MONTH, b=A_MONTH) as t:
        for name in ("a", "a", "b", "a"):
            for one in engines:
                one.made = 0  # both count 100 tokens for each
            await t.ended(name, **create(request_id=id, store=False))
        assert (spent(t), spent(t, "b")) == ((120, 300), (40, 100))


@pytest.mark.parametrize("id", ["resp_free", "my-own.id:1"])
async def test_what_was_made_in_the_background_is_paid_for_though_its_id_was_used_before(tmp_path, id):
    engine = Stores()
    async with tenants(tmp_path, engine.script, a=A_MONTH, b=A_MONTH) as t:
        for paid, background in enumerate((True, False, True), 1):
            engine.made, engine.done = 0, False
            await t.ask(**create(request_id=id, **({"background": True} if background else {})))
            engine.done = True
            for _ in range(2):
                await get(t, b"/v1/responses/" + id.encode())
                await eventually(t.stack.idle)
                assert spent(t) == (40 * paid, 100 * paid)


@pytest.mark.parametrize("behind", [
    {"user": "u" * 300_000},
    {"user": '"\\' * 150_000},
    {"user": None, "input_messages": [{"content": "hi " * 100_000, "usage": {"input_tokens": 1, "output_tokens": 1}}]},
    {"user": None, "output_messages": [{"tokens": [*range(100_000)], "usage": {}}] * 2},
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_costs_what_its_engine_told_however_much_the_client_put_behind_that(tmp_path, stream, behind):
    before = {"metadata": {"usage": "1"}, "tools": [{"type": "function", "parameters": {"usage": {"type": "object"}}}]}
    made = {"id": "resp_1", "object": "response", "output": [], **before, "usage": Stores.usage(1), **behind}
    whole = json.dumps(made).encode()
    created = b'data: {"type":"response.created","response":%b}\n\n' % json.dumps(made | {"usage": None}).encode()
    told = b'data: {"type":"response.output_text.delta","delta":"x"}\n\n'
    last = b'data: {"type":"response.completed","response":%b}\n\n' % whole
    script = streams(chunk(created), chunk(told), chunk(last)) if stream else answers(whole)
    async with tenants(tmp_path, script, a=A_MONTH) as t:
        assert (await t.ended(**create(stream=stream)))[0] == 200
        assert spent(t) == (40, 100)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_response_without_usage_costs_what_was_written_meanwhile_if_it_is_not_only_queued(
    tmp_path, leaves, background
):
    async def script(reader, writer):
        await read_request(reader)
        (exchange,) = t.stack.proxy.exchanges
        exchange.attempts[-1].sent_at -= 3600
        answer = reply(response("resp_1", None, "queued" if background else "completed", user="u" * 9000))
        writer.write(answer[: -1 if leaves else None])
        await reader.read()

    async with tenants(tmp_path, script, a=A_MONTH) as t:
        talk = await t.begin(**create(background=background, max_output_tokens=50))
        await talk.reader.readuntil(b"resp_1")
        if leaves:
            await talk.close()
        await eventually(t.stack.idle)
        assert spent(t)[1] == (0 if background and not leaves else 16 * 50)


@pytest.mark.parametrize(("fields", "most"), [
    ({"max_tokens": 50}, 50), ({"max_tokens": 50, "n": 3}, 150), ({}, 700), ({"max_completion_tokens": 4000}, 700),
])  # fmt: skip
async def test_a_client_that_leaves_before_an_answer_in_one_piece_pays_for_what_was_written(tmp_path, fields, most):
    async with tenants(tmp_path, silent, a=A_MONTH) as t:
        (backend,) = t.stack.proxy.backends.values()
        backend.replica.max_model_len = 700
        talk = await t.begin(body=json.dumps(json.loads(BODY) | fields).encode())
        await eventually(lambda: any(exchange.unanswered for exchange in t.stack.proxy.exchanges))
        (exchange,) = t.stack.proxy.exchanges
        exchange.attempts[-1].sent_at -= 3600  # since when any engine has written all that was asked for
        await talk.close()
        await eventually(t.stack.idle)
        input, output = spent(t)
        assert input > 0 and output == most


async def test_what_was_written_is_told_by_the_pace_of_answers_that_came(tmp_path):
    async def script(reader, writer):
        await read_request(reader)
        (exchange,) = t.stack.proxy.exchanges
        exchange.attempts[-1].sent_at -= 1000
        writer.write(
            reply(json.dumps({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 100}}).encode())
        )
        await read_request(reader)
        asked.set()
        await reader.read()

    asked = asyncio.Event()
    async with tenants(tmp_path, script, a=A_MONTH) as t:
        await t.ended()
        talk = await t.begin()
        await asked.wait()
        (exchange,) = t.stack.proxy.exchanges
        exchange.attempts[-1].sent_at -= 400
        await talk.close()
        await eventually(t.stack.idle)
        assert 100 + 39 <= spent(t)[1] <= 100 + 50, "ten seconds a token, but for what this machine is slow"


async def test_a_client_that_leaves_at_once_or_an_engine_that_is_ill_costs_no_output(tmp_path):
    async with tenants(tmp_path, silent, silent, a=A_MONTH) as t:
        for ill in (False, True):
            talk = await t.begin()
            await eventually(lambda: any(exchange.unanswered for exchange in t.stack.proxy.exchanges))
            (exchange,) = t.stack.proxy.exchanges
            if ill:
                exchange.attempts[-1].sent_at -= 3600
                exchange.attempts[-1].backend.replica.state = "failed"
            else:
                exchange.attempts[-1].sent_at += 3600  # however long this test waits for its turn
            await talk.close()
            await eventually(lambda: not t.stack.proxy.exchanges)
        assert spent(t)[1] == 0


def usages(prompt, completion):
    return {
        "/v1/chat/completions": {"prompt_tokens": prompt, "completion_tokens": completion},
        "/v1/messages": {"input_tokens": prompt, "output_tokens": completion},
        "/v1/responses": {"input_tokens": prompt, "output_tokens": completion},
    }


@pytest.mark.parametrize("told", [(HUGE, 3), (20, HUGE), (HUGE, HUGE), (900_000, 60), (20, 900_000)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*usages(0, 0)])
async def test_a_count_that_cannot_be_empties_no_month(tmp_path, path, stream, told):
    usage = usages(*told)[path]
    if path.endswith("responses"):
        last = b'data: {"type":"response.completed","response":%b}\n\n' % response("resp_1", usage)
        whole, first = response("resp_1", usage), b'data: {"type":"response.output_text.delta","delta":"x"}\n\n'
    elif path.endswith("messages"):
        last = b'data: {"type":"message_delta","usage":%b}\n\n' % json.dumps(usage).encode()
        whole = json.dumps({"type": "message", "content": [], "usage": usage}).encode()
        first = b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}\n\n'
    else:
        last, first = b'data: {"choices":[],"usage":%b}\n\n' % json.dumps(usage).encode(), EVENT
        whole = json.dumps({"choices": [], "usage": usage}).encode()
    script = streams(chunk(first), chunk(last)) if stream else answers(whole)
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}], "input": "hi", limit: 50}
    async with tenants(tmp_path, script, a={"tokens_per_month": 10**12}) as t:
        (backend,) = t.stack.proxy.backends.values()
        backend.replica.max_model_len = 50_000
        assert (await t.ended(body=json.dumps(body).encode(), path=path.encode()))[0] == 200
        input, output = spent(t)
        most = 16 if path.endswith("responses") else 1  # tools of the engine's own make a response of several answers
        assert 0 < input <= 20 and output <= 50 * most


@pytest.mark.parametrize(("path", "fields", "most"), [
    (b"/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 10}, 40),
    (b"/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 10}, 10),
    (b"/v1/completions", {"prompt": "a", "n": 5, "max_tokens": 10}, 50),
])  # fmt: skip
@pytest.mark.parametrize("over", [0, 1])
async def test_an_answer_has_at_most_as_many_tokens_as_each_of_its_sequences_may(tmp_path, path, fields, most, over):
    usage = {"prompt_tokens": 3, "completion_tokens": most + over}
    body = json.dumps({"choices": [], "usage": usage}).encode()
    async with tenants(tmp_path, answers(body), a=A_MONTH) as t:
        await t.ended(body=json.dumps({"model": "m", **fields}).encode(), path=path)
        assert spent(t)[1] <= most and (over or spent(t) == (3, most))


@pytest.mark.parametrize(("told", "counted"), [(4096, 4096), (40_000, None)])
async def test_a_prompt_that_is_known_has_no_more_tokens_than_its_text_may_have(tmp_path, told, counted):
    """Though the context has room for more. An engine may add a system prompt of its own."""
    body = json.dumps({"choices": [], "usage": {"prompt_tokens": told, "completion_tokens": 1}}).encode()
    pipeline = Pipeline(sim_model_dir(), "m", 16)
    async with tenants(tmp_path, answers(body), a=A_MONTH, pipeline=pipeline) as t:
        await t.ended()
        own = pipeline.prepare("/v1/chat/completions", BODY).tokens
        assert spent(t)[0] == (counted or own) and own < 100


async def test_a_stream_with_more_events_than_tokens_were_asked_for_costs_those(tmp_path):
    async with tenants(tmp_path, streams(*[chunk(EVENT)] * 30), a=A_MONTH) as t:
        await t.ended(body=BODY.replace(b"{", b'{"stream": true, "max_tokens": 9,', 1))
        assert spent(t)[1] == 9
