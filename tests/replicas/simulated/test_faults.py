"""Faults on order happen, so often as ordered, and then no more."""

import asyncio

import aiohttp
import pytest

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "What came in today?"}], "max_tokens": 5}


async def chat(stack, **more):
    return await stack.post("/v1/chat/completions", **{**CHAT, **more})


@pytest.mark.parametrize("status, type", [(503, "Service Unavailable"), (500, "InternalServerError")])
async def test_errors_so_many_times(stack, status, type):
    fault = f"error_{status}"
    assert (await stack.post("/faults", **{fault: 2}))[fault] == 2
    for _ in range(2):
        got, error = await stack.refused("/v1/chat/completions", CHAT)
        assert (got, error["code"], error["type"]) == (status, status, type)
    await chat(stack)
    assert (await stack.get("/faults"))[fault] == 0


async def test_a_refused_connection_gets_no_answer(stack):
    await stack.post("/faults", refuse=1)
    with pytest.raises(aiohttp.ClientError):
        await chat(stack)
    await chat(stack)
    await stack.idle()


async def test_a_stream_that_breaks_off_has_no_end(stack):
    await stack.post("/faults", die_mid_stream=1)
    raw = b""
    with pytest.raises(aiohttp.ClientError):
        async with stack.session.post(stack.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            async for chunk in response.content.iter_any():
                raw += chunk
    assert raw.count(b'"content"') >= 2 and b"[DONE]" not in raw
    await stack.idle()
    assert stack.engine.kv_usage == 0
    assert (await stack.stream("/v1/chat/completions", **CHAT))[-1] == (None, "[DONE]")


STREAMS = [
    ("/v1/chat/completions", CHAT, None),
    ("/v1/completions", {"prompt": "What came in today?"}, None),
    ("/v1/responses", {"input": "What came in today?"}, "error"),
    ("/v1/messages", CHAT, "error"),
]


@pytest.mark.parametrize("path, body, name", STREAMS)
@pytest.mark.parametrize("fault", ["error_stream", "error_mid_stream"])
async def test_a_stream_that_fails_says_so_behind_a_200(stack, path, body, name, fault):
    await stack.post("/faults", **{fault: 1})
    events = await stack.stream(path, **body)
    events = [(kind, data) for kind, data in events if data != "[DONE]"]
    ((kind, data),) = [(kind, data) for kind, data in events if (kind == "error" if name else "error" in data)]
    assert kind == name and "Internal server error" in str(data)
    deltas = (None, "content_block_delta", "response.output_text.delta")
    assert (len([kind for kind, _ in events if kind in deltas]) > 1) == (fault == "error_mid_stream")
    await stack.idle()
    assert "Internal server error" not in str(await stack.stream(path, **body))


async def test_a_share_of_all_requests_fails(stack):
    await stack.post("/faults", error_share=1.0)
    assert (await stack.refused("/v1/chat/completions", CHAT))[0] == 500
    assert "error" in (await stack.stream("/v1/chat/completions", **CHAT))[0][1]
    await stack.post("/faults", error_share=0)
    await chat(stack)


async def test_an_id_outside_the_vocabulary_is_refused_as_vllm_does(stack):
    """0.32: a stream has its 200 by then."""
    events = await stack.stream("/v1/completions", prompt=[1, 99_999_999])
    error = {"message": "Token id 99999999 is out of vocabulary", "type": "BadRequestError", "param": None, "code": 400}
    assert events == [(None, {"error": error}), (None, "[DONE]")]


async def test_a_slow_engine_is_that_much_slower(run_stack):
    async with run_stack() as stack:

        async def seconds() -> float:
            begun = asyncio.get_running_loop().time()
            await chat(stack, max_tokens=40, ignore_eos=True)
            return asyncio.get_running_loop().time() - begun

        await seconds()  # the first one loads what is loaded once
        await stack.post("/faults", slow=30)
        slow = await seconds()
        await stack.post("/faults", slow=1)
        assert slow >= 0.58 and await seconds() < slow


@pytest.mark.parametrize(
    "order",
    [
        *({"slow": 0}, {"slow": True}, {"error_500": -1}, {"error_share": 2}, {"error_503": "many"}),
        *({"sleep": 3}, {"refuse": 1, "typo": 2}),
    ],
)
async def test_what_is_not_understood_is_refused_and_changes_nothing(stack, order):
    status, error = await stack.refused("/faults", order)
    assert status == 400 and error["message"]
    state = await stack.get("/faults")
    assert not any(value for name, value in state.items() if name != "slow") and state["slow"] == 1
