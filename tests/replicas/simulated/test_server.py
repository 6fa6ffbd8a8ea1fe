"""The endpoints, over real sockets: what vLLM's clients expect of them."""

import asyncio
import json
import random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replicas.simulated.profile import StepTime

from .conftest import cached_tokens, eventually

CHATS = "/v1/chat/completions"
LONG = [{"role": "system", "content": "You keep the ledger of the harbour. " * 20}]
CHAT = {"model": "sim", "messages": [*LONG, {"role": "user", "content": "What came in today?"}]}


def text_of(events: list) -> str:
    choices = [choice for _, data in events if data != "[DONE]" for choice in data["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_a_chat_whole_and_streamed_say_the_same(stack):
    whole = await stack.post(CHATS, **CHAT, max_tokens=9)
    events = await stack.stream(CHATS, **CHAT, max_tokens=9, stream_options={"include_usage": True})
    message, usage = whole["choices"][0]["message"], whole["usage"]
    assert (message["role"], whole["choices"][0]["finish_reason"]) == ("assistant", "length")
    assert text_of(events) == message["content"] and len(message["content"]) > 20
    assert usage["completion_tokens"] == 9 and usage["total_tokens"] == usage["prompt_tokens"] + 9
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert events[0][1]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [data["choices"][0]["finish_reason"] for _, data in events[1:-2]] == [None] * 8 + ["length"]
    assert events[-1] == (None, "[DONE]")
    last = events[-2][1]
    cached = (usage["prompt_tokens"] - 1) // 16 * 16
    assert last["choices"] == [] and last["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert len({data["id"] for _, data in events[:-1]}) == 1


async def test_a_reply_ends_by_itself_unless_told_not_to(stack, tokens):
    ended = await stack.post(CHATS, **CHAT, return_token_ids=True)
    choice = ended["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["token_ids"][-1] == tokens.eos_id
    assert choice["message"]["content"].endswith(".")
    natural = len(choice["token_ids"])
    assert ended["usage"]["completion_tokens"] == natural
    on = await stack.post(CHATS, **CHAT, ignore_eos=True, max_tokens=natural + 5)
    assert on["usage"]["completion_tokens"] == natural + 5 and on["choices"][0]["finish_reason"] == "length"
    least = await stack.post(CHATS, **CHAT, min_tokens=natural + 3)
    assert least["usage"]["completion_tokens"] == natural + 4


async def test_a_stop_string_ends_the_reply_and_is_not_shown(stack):
    whole = (await stack.post(CHATS, **CHAT))["choices"][0]["message"]["content"]
    stop = whole.split()[4]
    cut = await stack.post(CHATS, **CHAT, stop=[stop, "never said"])
    choice = cut["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert text_of(await stack.stream(CHATS, **CHAT, stop=stop)) == whole[: whole.index(stop)]


async def test_the_next_turn_finds_prompt_and_reply_in_the_cache(stack):
    first = await stack.post(CHATS, **CHAT, return_token_ids=True)
    answer = first["choices"][0]["message"]
    messages = [*CHAT["messages"], {"role": "assistant", "content": answer["content"]}]
    messages.append(
        {"role": "user", "content": "And yesterday, and the day before, and in the whole week before that?"}
    )
    second = await stack.post(CHATS, model="sim", messages=messages, max_tokens=1)
    computed = first["usage"]["total_tokens"] - 1
    assert cached_tokens(second) == computed // 16 * 16


@pytest.mark.parametrize(
    "path, wanted, read",
    [
        (CHATS, {"prompt_logprobs": 0}, False),
        (CHATS, {"echo": True}, False),
        (CHATS, {"echo": False, "logprobs": True}, True),
        ("/v1/completions", {"prompt_logprobs": 1}, False),
        ("/v1/completions", {"echo": True, "logprobs": 0}, False),
        ("/v1/completions", {"echo": True}, True),
    ],
)
async def test_a_request_for_the_prompts_logprobs_reads_nothing_cached(stack, path, wanted, read):
    """As vLLM: what is cached has none. The next request finds what it stored."""
    prompt = {"messages": CHAT["messages"]} if "chat" in path else {"prompt": "Once upon a time. " * 20}
    found = []
    for fields in ({}, wanted, {}):
        found.append(cached_tokens(await stack.post(path, model="sim", max_tokens=1, **prompt, **fields)))
    assert found[2] >= 16 and found == [0, found[2] if read else 0, found[2]]


async def test_another_engine_continues_a_reply_from_its_tokens(run_stack):
    async with run_stack(seed=1) as one, run_stack(seed=2) as other:
        whole = await one.post(CHATS, **CHAT, return_token_ids=True)
        prompt, said = whole["prompt_token_ids"], whole["choices"][0]["token_ids"]
        rest = await other.post("/v1/completions", prompt=prompt + said[:7], max_tokens=500, return_token_ids=True)
        assert rest["choices"][0]["token_ids"] == said[7:]


async def test_prompts_of_every_kind_and_n(stack, tokens):
    text = "The harbour at night"
    ids = tokens.encode(text, True)
    one = await stack.post("/v1/completions", prompt=text)
    assert one["usage"]["completion_tokens"] == 16 and one["object"] == "text_completion"
    assert (await stack.post("/v1/completions", prompt=ids))["choices"] == one["choices"]
    for prompts in ([text, "Elsewhere"], [ids, tokens.encode("Elsewhere", True)]):
        many = await stack.post("/v1/completions", prompt=prompts, n=2, max_tokens=4)
        assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
        prompt = len(ids) + len(tokens.encode("Elsewhere", True))
        assert (many["usage"]["completion_tokens"], many["usage"]["prompt_tokens"]) == (16, prompt)
        events = await stack.stream("/v1/completions", prompt=prompts, n=2, max_tokens=4)
        texts = [""] * 4
        for _, data in events[:-1]:
            texts[data["choices"][0]["index"]] += data["choices"][0]["text"]
        assert texts == [choice["text"] for choice in many["choices"]]


async def test_token_ids_in_a_stream_add_up(stack):
    for path, body in ((CHATS, CHAT), ("/v1/completions", {"prompt": "The harbour at night"})):
        whole = await stack.post(path, **body, max_tokens=6, return_token_ids=True)
        events = [data for _, data in (await stack.stream(path, **body, max_tokens=6, return_token_ids=True))[:-1]]
        streamed = [id for data in events for id in data["choices"][0].get("token_ids") or ()]
        assert streamed == whole["choices"][0]["token_ids"] and len(streamed) == 6
        prompts = [data.get("prompt_token_ids") or data["choices"][0].get("prompt_token_ids") for data in events]
        assert prompts[0] == (whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"])
        assert not any(prompts[1:])


async def test_ids_given_with_a_chat_are_taken_as_they_are(stack):
    given = {"prompt_token_ids": list(range(1000, 1040))}
    answer = await stack.post(CHATS, **CHAT, max_tokens=1, return_token_ids=True, kv_transfer_params=given)
    assert answer["prompt_token_ids"] == given["prompt_token_ids"]


async def test_the_head_of_a_stream_comes_long_before_its_first_token(run_stack):
    async with run_stack(step=StepTime(prefill=400.0, decode=0.5)) as stack:
        begun = asyncio.get_running_loop().time()
        async with stack.session.post(stack.url + CHATS, json={**CHAT, "stream": True}) as response:
            head = asyncio.get_running_loop().time() - begun
            assert head < 0.3 and response.headers["transfer-encoding"] == "chunked"
            await response.content.readany()
            assert asyncio.get_running_loop().time() - begun >= 0.4


async def test_responses(stack):
    body = {"input": "What came in today?", "instructions": "Be brief.", "max_output_tokens": 4}
    whole = await stack.post("/v1/responses", **body)
    (item,) = whole["output"]
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["usage"]["output_tokens"] == 4
    events = await stack.stream("/v1/responses", **body)
    begins = ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    wanted = [*begins, *["output_text.delta"] * 4, *ends]
    assert [name for name, _ in events] == [f"response.{name}" for name in wanted]
    assert [data["sequence_number"] for _, data in events] == list(range(12))
    said = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    assert said == item["content"][0]["text"] == events[-1][1]["response"]["output"][0]["content"][0]["text"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": body["input"]}]
    chat = await stack.post(CHATS, max_tokens=4, messages=messages)
    assert chat["usage"]["prompt_tokens"] == whole["usage"]["input_tokens"]
    assert chat["choices"][0]["message"]["content"] == said


async def test_messages(stack):
    content = [{"type": "text", "text": "What came in today?"}]
    body = {"system": "Be brief.", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    whole = await stack.post("/v1/messages", **body)
    assert (whole["type"], whole["stop_reason"], whole["usage"]["output_tokens"]) == ("message", "max_tokens", 4)
    counted = await stack.post("/v1/messages/count_tokens", **body)
    assert counted["input_tokens"] == whole["usage"]["input_tokens"]
    events = await stack.stream("/v1/messages", **body)
    ends = ["content_block_stop", "message_delta", "message_stop"]
    begins = ["message_start", "content_block_start"]
    assert [name for name, _ in events] == [*begins, *["content_block_delta"] * 4, *ends]
    said = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert said == whole["content"][0]["text"]
    assert events[-2][1]["usage"] == whole["usage"]


async def test_embeddings_depend_on_the_text_alone(stack):
    one = await stack.post("/v1/embeddings", input="The harbour")
    two = await stack.post("/v1/embeddings", input=["The harbour", "The station"])
    vectors = [entry["embedding"] for entry in two["data"]]
    assert one["data"][0]["embedding"] == vectors[0] != vectors[1]
    assert sum(number * number for number in vectors[1]) == pytest.approx(1)
    assert one["usage"]["prompt_tokens"] > 0


async def test_tokenize_and_back(stack, tokens):
    text = "The harbour, at night: 12345 ships."
    told = await stack.post("/tokenize", prompt=text)
    assert told["tokens"] == tokens.encode(text, True) and told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 8192
    assert (await stack.post("/detokenize", tokens=told["tokens"]))["prompt"] == text
    chat = await stack.post("/tokenize", messages=CHAT["messages"])
    assert chat["tokens"] == tokens.chat(CHAT)


async def test_adapters_and_salts_share_nothing(stack):
    base, adapter = (await stack.get("/v1/models"))["data"]
    assert (base["id"], base["parent"], base["max_model_len"]) == ("sim", None, 8192)
    assert (adapter["id"], adapter["parent"]) == ("tuned", "sim")
    salted = [{"model": model, "cache_salt": salt} for model, salt in (("sim", "a"), ("sim", "b"), ("tuned", "a"))]
    for extra in ({}, {"model": "tuned"}, *salted):
        first, second = [cached_tokens(await stack.post(CHATS, **CHAT | extra, max_tokens=1)) for _ in range(2)]
        assert first == 0 and second > 100, extra


async def test_cached_tokens_can_be_left_out(run_stack):
    async with run_stack(show_cached=False) as stack:
        answer = await stack.post(CHATS, **CHAT, max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"] is None


@pytest.mark.parametrize(
    "path, body, param",
    [
        (CHATS, b"{not json", None),
        (CHATS, b"[1]", None),
        (CHATS, {"messages": []}, "messages"),
        (CHATS, {"messages": "hello"}, "messages"),
        (CHATS, {"messages": [{"role": "user", "content": 7}]}, "messages"),
        (CHATS, {"messages": [{"role": "owl", "content": ""}]}, None),
        (CHATS, {**CHAT, "max_tokens": 0}, "max_tokens"),
        (CHATS, {**CHAT, "max_tokens": "7"}, "max_tokens"),
        (CHATS, {**CHAT, "max_tokens": 8192}, "input_tokens"),
        (CHATS, {**CHAT, "max_tokens": 1 << 40}, "max_tokens"),
        (CHATS, {**CHAT, "max_completion_tokens": 1 << 40}, "max_completion_tokens"),
        (CHATS, {**CHAT, "n": 16_385}, "n"),
        (CHATS, {**CHAT, "cache_salt": ""}, "cache_salt"),
        (CHATS, {**CHAT, "continue_final_message": True}, None),
        (CHATS, {**CHAT, "kv_transfer_params": 5}, "kv_transfer_params"),
        (CHATS, {**CHAT, "temperature": "hot"}, "temperature"),
        (CHATS, {**CHAT, "temperature": -1}, "temperature"),
        (CHATS, {**CHAT, "top_p": 0}, "top_p"),
        (CHATS, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls"),
        ("/v1/completions", {"prompt": [99_999_999]}, None),
        ("/v1/completions", {"prompt": [5] * 8192}, "input_tokens"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [1, -1]}, "prompt"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/responses", {}, "input"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1 << 40}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "tools": [5]}, None),
        ("/v1/messages", {"messages": []}, "max_tokens"),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": ["x"]}]}, None),
        ("/v1/embeddings", {"input": {}}, "input"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/v1/messages/count_tokens", {"model": ["a"], "messages": []}, "model"),
        ("/v1/messages/count_tokens", {**CHAT, "system": True}, "system"),
    ],
)
async def test_errors_are_openai_objects(stack, path, body, param):
    got, error = await stack.refused(path, body)
    assert (got, error["code"], error["type"], error["param"]) == (400, 400, "BadRequestError", param)
    assert error["message"]


async def test_what_is_not_there_is_404(stack):
    for path, body, param in (
        (CHATS, {**CHAT, "model": "other"}, "model"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/nothing/here", {}, None),
    ):
        got, error = await stack.refused(path, body)
        assert (got, error["code"], error["param"]) == (404, 404, param) and error["message"]


async def test_a_request_id_may_have_any_bytes_that_a_header_may(stack):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xe9\xff\r\nConnection: close\r\n"
        b'Content-Length: 32\r\n\r\n{"prompt": "x", "max_tokens": 2}'
    )
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200") and '"id":"cmpl-\xe9\xff"'.encode() in answer


async def test_a_prompt_alone_may_be_asked_for(stack):
    """As evaluations ask for a text's logprobs; vLLM makes a token of it all the same."""
    assert (await stack.post("/v1/completions", prompt="x", max_tokens=0, echo=True))["choices"]


async def test_a_wrong_method_names_the_right_one(stack):
    async with stack.session.delete(stack.url + "/v1/models") as response:
        assert response.status == 405 and "GET" in response.headers["Allow"]
        assert (await response.json())["error"]["code"] == 405


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(run_stack, stream):
    async with run_stack(step=StepTime(prefill=1.0, decode=20.0)) as stack:
        body = {**CHAT, "stream": stream, "ignore_eos": True, "max_tokens": 4000}
        asking = asyncio.ensure_future(stack.session.post(stack.url + CHATS, json=body))
        await eventually(lambda: stack.engine.running)
        if stream:
            (await asking).close()
        else:
            asking.cancel()
        await stack.idle()
        assert stack.engine.kv_usage == 0 and stack.server.runner.live == 0
        assert await stack.get("/load") == {"server_load": 0}
        text = await (await stack.session.get(stack.url + "/metrics")).text()
        assert 'vllm:request_success_total{engine="0",model_name="sim",finished_reason="abort"} 1.0' in text


async def test_metrics_are_vllms_and_count(stack):
    for _ in range(2):
        await stack.post(CHATS, **CHAT, max_tokens=5)
    async with stack.session.get(stack.url + "/metrics") as response:
        families = [*text_string_to_metric_families(await response.text())]
    samples = {(one.name, one.labels.get("finished_reason")): one for family in families for one in family.samples}

    def value(name, reason=None):
        return samples[name, reason].value

    prompt = stack.engine.counters.prompt_tokens // 2
    assert value("vllm:prefix_cache_queries_total") == 2 * prompt == value("vllm:prompt_tokens_total")
    assert value("vllm:prefix_cache_hits_total") == (prompt - 1) // 16 * 16
    assert value("vllm:generation_tokens_total") == 10
    assert value("vllm:request_success_total", "length") == 2
    assert value("vllm:time_to_first_token_seconds_count") == 2
    assert value("vllm:inter_token_latency_seconds_count") == 8
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
    config = samples["vllm:cache_config_info", None].labels
    assert (config["block_size"], config["num_gpu_blocks"]) == ("16", "2048")
    assert value("process_start_time_seconds") > 1.7e9


async def test_the_prefix_cache_is_reset_when_idle(stack):
    for cached in (False, True, False):
        if not cached:
            async with stack.session.post(stack.url + "/reset_prefix_cache") as response:
                assert response.status == 200
        assert (cached_tokens(await stack.post(CHATS, **CHAT, max_tokens=1)) > 0) is cached


async def test_http_1_0_gets_a_stream_without_chunks(stack):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))
    body = json.dumps({**CHAT, "max_tokens": 2, "stream": True}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    raw = await reader.read()
    writer.close()
    head, _, events = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and events.startswith(b"data: ") and events.endswith(b"[DONE]\n\n")


async def test_many_streams_at_once_are_whole(stack):
    async def ask(number: int) -> tuple:
        body = {"model": "sim", "max_tokens": 20, "messages": [{"role": "user", "content": f"Ship {number}?"}]}
        whole = await stack.post(CHATS, **body)
        return text_of(await stack.stream(CHATS, **body)), whole["choices"][0]["message"]["content"]

    for streamed, whole in await asyncio.gather(*map(ask, range(40))):
        assert streamed == whole
    await stack.idle()


async def test_a_large_body_is_tokenized_off_the_event_loop(run_stack):
    async with run_stack(max_model_len=200_000, num_blocks=16_384) as stack:
        text = "The harbour at night is quiet. " * 12_000
        answer = await stack.post("/v1/completions", prompt=text, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] > 50_000


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(stack):
    rng = random.Random(1)
    port = int(stack.url.rsplit(":", 1)[1])

    async def visit(number: int) -> None:
        body = json.dumps({**CHAT, "stream": number % 3 > 0, "ignore_eos": True, "max_tokens": 200}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        raw = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        writer.write(raw[: rng.choice((len(raw), len(raw), len(raw) // 2))])
        await asyncio.sleep(rng.choice((0, 0.001, 0.01, 0.05)))
        writer.transport.abort()

    await asyncio.gather(*map(visit, range(90)))
    await eventually(lambda: stack.server.runner.live == 0)
    await stack.idle()
    assert stack.engine.kv_usage == 0
    assert (await stack.post(CHATS, **CHAT, max_tokens=2))["usage"]["completion_tokens"] == 2


async def test_adapters_come_and_go_at_run_time(stack):
    async def ask(path, **body):
        async with stack.session.post(stack.url + path, json=body) as response:
            return response.status

    async def listed():
        return [card["id"] for card in (await stack.get("/v1/models"))["data"]]

    assert await ask("/v1/load_lora_adapter", lora_name="sql", lora_path="/sql") == 200
    assert await listed() == ["sim", "tuned", "sql"]
    assert await ask("/v1/completions", model="sql", prompt="x", max_tokens=1) == 200
    assert await ask("/v1/load_lora_adapter", lora_name="sql", lora_path="/sql") == 400
    assert await ask("/v1/load_lora_adapter", lora_path="/sql") == 400
    assert await ask("/v1/unload_lora_adapter", lora_name="sql") == 200
    assert await listed() == ["sim", "tuned"]
    assert await ask("/v1/completions", model="sql", prompt="x", max_tokens=1) == 404
    assert await ask("/v1/unload_lora_adapter", lora_name="sql") == 404
