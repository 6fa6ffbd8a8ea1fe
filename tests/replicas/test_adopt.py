import asyncio
import json
import os
import resource

import pytest
from aiohttp import web

from replicas.adopt import probe
from replicas.ports import pick
from replicas.replica import EventSource

MODELS = {
    "data": [
        {"id": "llama", "root": "/models/llama", "parent": None, "max_model_len": 8192},
        {"id": "sql", "root": "/adapters/sql", "parent": "llama", "max_model_len": None},
    ]
}
METRICS = 'process_start_time_seconds 12.5\nvllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1.0\n'
SOURCES = {
    "0": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "topic": "kv@r0@llama",
    }
}
VLLM = {"/health": "", "/v1/models": MODELS, "/version": {"version": "0.32.0"}, "/metrics": METRICS}
VLLM["/kv_event_sources"] = SOURCES


def pages(given: dict):
    """A handler that answers each path with its text, object or status, all else with 404."""

    async def handler(request):
        page = given.get(request.path, 404)
        if isinstance(page, int):
            return web.Response(status=page)
        return web.Response(text=page if isinstance(page, str) else json.dumps(page))

    return handler


async def test_a_vllm_tells_everything(serve, session):
    facts = await probe(await serve(pages(VLLM)), session)
    assert facts.alive and facts.serving and not facts.fault and not facts.problems
    assert facts.models == {"llama": None, "sql": "llama"}
    assert (facts.max_model_len, facts.version) == (8192, "0.32.0")
    assert (facts.block_size, facts.num_blocks, facts.scrape.started) == (32, 100, 12.5)
    assert facts.sources == {0: EventSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv@r0@llama")}


async def test_a_mock_that_answers_everything_alike_is_served(serve, session):
    async def handler(request):
        return web.json_response({})

    facts = await probe(await serve(handler), session)
    assert facts.alive and facts.serving and facts.models == {} and facts.sources == {}
    assert set(facts.problems) == {"models", "metrics", "events"}


@pytest.mark.parametrize("body", ["[]", "null", "<html>", '{"data": {}}', "\x00"])
async def test_answers_of_another_shape(serve, session, body):
    async def handler(request):
        return web.Response(text=body)

    facts = await probe(await serve(handler), session)
    assert facts.alive and facts.serving and "models" in facts.problems


@pytest.mark.parametrize("data", [[], [{}], ["llama"], [{"id": 3}]])
async def test_no_model_listed_yet_is_not_serving(serve, session, data):
    facts = await probe(await serve(pages({**VLLM, "/v1/models": {"data": data}})), session)
    assert facts.alive and not facts.serving and not facts.fault
    assert "still loading" in facts.error


@pytest.mark.parametrize(
    "path, key, remedy",
    [
        ("/metrics", "metrics", "set block_size"),
        ("/kv_event_sources", "events", "URL#events=tcp://HOST:PORT"),
    ],
)
async def test_whatever_is_missing_is_named_with_its_remedy(serve, session, path, key, remedy):
    facts = await probe(await serve(pages({**VLLM, path: 404})), session)
    assert facts.serving and remedy in facts.problems.pop(key) and not facts.problems


async def test_version_may_be_missing(serve, session):
    facts = await probe(await serve(pages({**VLLM, "/version": 404})), session)
    assert facts.serving and facts.version is None and not facts.problems


async def test_an_api_key_hides_the_models_only(serve, session):
    facts = await probe(await serve(pages({**VLLM, "/v1/models": 401})), session)
    assert facts.serving and "API key" in facts.problems["models"]


async def test_an_engine_without_health_is_judged_by_its_models(serve, session):
    facts = await probe(await serve(pages({"/v1/models": MODELS})), session)
    assert facts.alive and facts.serving and "sql" in facts.models


@pytest.mark.parametrize(
    "config, said",
    [
        ({**SOURCES["0"], "enable_kv_cache_events": False}, "--kv-events-config"),
        ({**SOURCES["0"], "publisher": "null"}, "--kv-events-config"),
        ({**SOURCES["0"], "endpoint": "tcp://127.0.0.1:5557"}, "write the endpoint as tcp://*:PORT"),
        ({"publisher": "zmq"}, "names no endpoint"),
    ],
)
async def test_events_nobody_can_subscribe_to(serve, session, config, said):
    facts = await probe(await serve(pages({**VLLM, "/kv_event_sources": {"0": config}})), session)
    assert facts.serving and not facts.sources and said in facts.problems["events"]


async def test_other_endpoints_are_taken_as_they_are(serve, session):
    config = {"endpoint": "ipc:///tmp/kv", "replay_endpoint": "tcp://10.0.0.9:5558"}
    facts = await probe(await serve(pages({**VLLM, "/kv_event_sources": {"0": config}})), session)
    assert facts.sources == {0: EventSource("ipc:///tmp/kv", "tcp://10.0.0.9:5558", "")}


async def test_several_ranks_are_all_known_and_said(serve, session):
    ranks = {"0": SOURCES["0"], "1": {**SOURCES["0"], "endpoint": "tcp://*:5559"}}
    facts = await probe(await serve(pages({**VLLM, "/kv_event_sources": ranks})), session)
    assert facts.sources[1].endpoint == "tcp://127.0.0.1:5559" and "2 data-parallel" in facts.problems["ranks"]


@pytest.mark.parametrize(
    "change, fault, said",
    [
        ({"/health": 503}, "5xx", "503"),
        ({"/health": 418}, "refused", "OpenAI-compatible"),
        ({"/v1/models": 500}, "5xx", "/v1/models answers 500"),
    ],
)
async def test_engines_that_answer_badly(serve, session, change, fault, said):
    facts = await probe(await serve(pages({**VLLM, **change})), session)
    assert not facts.serving and facts.fault == fault and said in facts.error


async def test_nobody_there(session):
    port = pick(1, "127.0.0.1", set())[0]
    facts = await probe(f"http://127.0.0.1:{port}", session)
    assert not facts.alive and facts.fault == "connect" and "nothing listens" in facts.error


async def test_no_such_host(session):
    facts = await probe("http://no-such-host.invalid:80", session)
    assert facts.fault == "connect" and "does not resolve" in facts.error


async def test_a_server_that_never_answers(serve, session):
    async def handler(request):
        await asyncio.Event().wait()

    facts = await probe(await serve(handler), session, deadline=0.1)
    assert facts.fault == "timeout" and "within 0.1 s" in facts.error


async def test_a_port_that_does_not_speak_http(session):
    async def hang_up(reader, writer):
        await reader.read(1)
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        facts = await probe(f"http://127.0.0.1:{port}", session)
    assert not facts.alive and facts.fault == "closed"


async def test_a_gateway_out_of_descriptors_blames_itself(serve, session):
    url = await serve(pages(VLLM))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with pytest.raises(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        facts = await probe(url, session)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert facts.fault == "own" and "Too many open files" in facts.error and "ulimit -n" in facts.error
