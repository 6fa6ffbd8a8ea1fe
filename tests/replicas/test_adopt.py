import asyncio
import json
import os
import resource

import pytest
from aiohttp import web

from replicas import adopt
from replicas.adopt import probe, problems_of
from replicas.launch.ports import pick
from replicas.replica import EventSource

MODELS = {
    "data": [
        {"id": "llama", "root": "/models/llama", "parent": None, "max_model_len": 8192},
        {"id": "sql", "root": "/adapters/sql", "parent": "llama", "max_model_len": None},
    ]
}
METRICS = """process_start_time_seconds 12.5
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0",num_gpu_blocks="100"} 1.0
vllm:num_requests_running{engine="0",model_name="llama"} 0.0
vllm:num_requests_waiting{engine="0",model_name="llama"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="llama"} 0.0
vllm:prefix_cache_queries_total{engine="0",model_name="llama"} 0.0
vllm:prefix_cache_hits_total{engine="0",model_name="llama"} 0.0
"""
TWO_RANKS = METRICS + "".join(line.replace('engine="0"', 'engine="1"') + "\n" for line in METRICS.splitlines()[1:])
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
    assert facts.models == {"llama": None, "sql": "llama"} and facts.root == "/models/llama"
    assert (facts.max_model_len, facts.version) == (8192, "0.32.0")
    assert (facts.block_size, facts.num_blocks, facts.scrape.started) == (32, 100, 12.5)
    assert facts.events() == [EventSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv@r0@llama")]


async def test_a_mock_that_answers_everything_alike_is_served(serve, session):
    async def handler(request):
        return web.json_response({})

    facts = await probe(await serve(handler), session)
    assert facts.alive and facts.serving and facts.models == {} and facts.events() == [None]
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
    assert ("ids that are no text" if data else "still loading") in facts.error


@pytest.mark.parametrize("length", [-5, 0, True, "8192", 1.5])
async def test_a_context_that_no_model_has_is_not_believed(serve, session, length):
    listed = {"data": [{"id": "llama", "max_model_len": length}, {"id": "other", "max_model_len": 4096}]}
    facts = await probe(await serve(pages({**VLLM, "/v1/models": listed})), session)
    assert facts.max_model_len == 4096


async def test_of_a_catalogue_a_bounded_number_of_names_is_known(serve, session, monkeypatch):
    monkeypatch.setattr(adopt, "MOST_NAMES", 3)
    listed = {"data": [{"id": f"m{number}"} for number in range(4)]}
    facts = await probe(await serve(pages({**VLLM, "/v1/models": listed})), session)
    assert list(facts.models) == ["m0", "m1", "m2"] and "more than 3 names" in facts.problems["models"].what


@pytest.mark.parametrize(
    "path, key, remedy",
    [
        ("/metrics", "metrics", "set block_size"),
        ("/kv_event_sources", "events", "URL#events=tcp://HOST:PORT"),
    ],
)
async def test_whatever_is_missing_is_named_with_its_remedy(serve, session, path, key, remedy):
    facts = await probe(await serve(pages({**VLLM, path: 404})), session)
    assert facts.serving and remedy in str(facts.problems.pop(key)) and not facts.problems


@pytest.mark.parametrize(
    "version, page, takes",
    [
        ("0.28.0", METRICS, True),
        ("0.1.dev1+gabc", METRICS, True),
        ("0.9.2", METRICS, False),
        (None, METRICS, False),
        ("1.2.0", "other:requests 1\n", False),
    ],
)
async def test_only_a_vllm_that_is_known_to_takes_priorities(serve, session, version, page, takes):
    facts = await probe(await serve(pages(VLLM | {"/version": {"version": version}, "/metrics": page})), session)
    assert facts.told.takes_priority is takes


async def test_an_api_key_hides_the_models_only(serve, session):
    facts = await probe(await serve(pages({**VLLM, "/v1/models": 401})), session)
    said = facts.problems["models"]
    assert facts.serving and "API key" in said.what and "--engine-api-key" in said.remedy and len(facts.problems) == 1


@pytest.mark.parametrize(
    "config, said",
    [
        ({**SOURCES["0"], "enable_kv_cache_events": False}, "--kv-events-config"),
        ({**SOURCES["0"], "publisher": "null"}, "--kv-events-config"),
        ({**SOURCES["0"], "endpoint": "tcp://127.0.0.1:5557"}, "--kv-events-config as tcp://*:PORT"),
        ({"publisher": "zmq"}, "names no endpoint"),
        ({"endpoint": "tcp://*:port"}, "cannot be connected to"),
        ({"endpoint": "tcp://*:0"}, "cannot be connected to"),
        ({"endpoint": "tcp://*:99999"}, "cannot be connected to"),
        ({"endpoint": "inproc://*"}, "cannot be connected to"),
        ({"endpoint": "ipc:///" + "x" * 10_000}, "cannot be connected to"),
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://a b:5558"}, "cannot be connected to"),
    ],
)
async def test_events_nobody_can_subscribe_to(serve, session, config, said):
    facts = await probe(await serve(pages({**VLLM, "/kv_event_sources": {"0": config}})), session)
    assert facts.serving and facts.events() == [None] and said in str(facts.problems["events"])


def published(port: int, replay: int | None) -> dict:
    return {**SOURCES["0"], "endpoint": f"tcp://*:{port}", "replay_endpoint": replay and f"tcp://*:{replay}"}


async def test_each_rank_publishes_in_a_place_of_its_own(serve, session):
    ranks = {"1": published(5601, 5611), "0": published(5600, 5610)}  # vLLM lists them as they came up
    facts = await probe(await serve(pages({**VLLM, "/metrics": TWO_RANKS, "/kv_event_sources": ranks})), session)
    assert facts.engines == (0, 1) and [one.endpoint[-4:] + one.replay[-5:] for one in facts.events()] == [
        "5600:5610",
        "5601:5611",
    ]
    assert not facts.problems


async def test_an_older_vllms_ranks_publish_one_port_further_each(serve, session):
    facts = await probe(await serve(pages({**VLLM, "/metrics": TWO_RANKS, "/kv_event_sources": 404})), session)
    given = EventSource("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5567", "")
    sources = facts.events(given)
    assert sources == [given, EventSource("tcp://10.0.0.7:5558", "tcp://10.0.0.7:5568", "")]
    assert not problems_of(facts, given, sources)


async def test_an_engine_that_is_one_of_several_ranks_keeps_its_number(serve, session):
    """External load balancing: each rank has a URL of its own, and counts as the engine's number 3."""
    page = METRICS.replace('engine="0"', 'engine="3"')
    facts = await probe(
        await serve(pages({**VLLM, "/metrics": page, "/kv_event_sources": {"3": published(5603, 5613)}})), session
    )
    assert (
        facts.engines == (3,)
        and [one.endpoint for one in facts.events()] == ["tcp://127.0.0.1:5603"]
        and not facts.problems
    )


async def test_a_rank_without_events_is_named(serve, session):
    facts = await probe(await serve(pages({**VLLM, "/metrics": TWO_RANKS})), session)
    sources = facts.events()
    said = problems_of(facts, None, sources)["ranks"]
    assert sources[0] and sources[1] is None and "rank 1," in said.what
    ipc = EventSource("ipc:///tmp/kv", None, "")
    assert facts.events(ipc) == [ipc, None] and set(problems_of(facts, ipc, [ipc, None])) == {"ranks", "replay"}


async def test_ranks_that_a_probe_did_not_hear_of_are_not_gone(serve, session):
    facts = await probe(await serve(pages({**VLLM, "/metrics": 503, "/kv_event_sources": 404})), session)
    assert facts.engines == () and len(facts.events(None, 2)) == 2


async def test_a_publisher_that_gives_snapshots(serve, session):
    config = {"publisher": "zmq", "endpoint": "tcp://*:1", "snapshot_endpoint": "tcp://*:3", "topic": "kv"}
    facts = await probe(await serve(pages({**VLLM, "/kv_event_sources": {"0": config}})), session)
    (source,) = facts.sources.values()
    assert (
        source == EventSource("tcp://127.0.0.1:1", None, "kv", "tcp://127.0.0.1:3") and "replay" not in facts.problems
    )
    assert source.at_rank(2) == EventSource("tcp://127.0.0.1:3", None, "kv", "tcp://127.0.0.1:5")
    assert source.at("127.0.0.1", "10.0.0.7").snapshot == "tcp://10.0.0.7:3"


async def test_events_without_replay(serve, session):
    facts = await probe(await serve(pages({**VLLM, "/kv_event_sources": {"0": published(5557, None)}})), session)
    assert facts.events()[0].replay is None and "replay_endpoint" in facts.problems["replay"].remedy


async def test_the_operators_word_goes_before_the_engines(serve, session):
    facts = await probe(await serve(pages({**VLLM, "/kv_event_sources": {}})), session)
    given = EventSource("tcp://h:1", "tcp://h:2", "")
    assert facts.events(given) == [given] and not problems_of(facts, given, [given])
    assert "--kv-events-config" in problems_of(facts, None, [None])["events"].remedy


@pytest.mark.parametrize(
    "page, key, what, remedy",
    [
        ("python_info 1.0\n", "metrics", "no vllm: series", "--disable-log-stats"),
        (METRICS.replace("cache_config_info", "kv_config"), "metrics", "no vllm:cache_config_info", "block_size"),
        (
            METRICS.replace("num_requests_waiting", "queued"),
            "metrics",
            "lacks vllm:num_requests_waiting:",
            "newer Hitherto",
        ),
        (METRICS.replace("num_gpu_blocks", "num_device_blocks"), "metrics", "lacks num_gpu_blocks", "newer Hitherto"),
        (
            METRICS.replace('caching="True"', 'caching="False"'),
            "caching",
            "prefix caching is off",
            "--no-enable-prefix-caching",
        ),
    ],
)
async def test_metrics_that_are_not_what_they_were(serve, session, page, key, what, remedy):
    facts = await probe(await serve(pages({**VLLM, "/metrics": page})), session)
    assert facts.serving and list(facts.problems) == [key]
    assert what in str(facts.problems[key]) and remedy in facts.problems[key].remedy


async def test_event_sources_that_do_not_answer_are_not_gone(serve, session):
    facts = await probe(await serve(pages({**VLLM, "/kv_event_sources": 500})), session)
    assert facts.sources is None and "answers 500" in facts.problems["events"].what


@pytest.mark.parametrize(
    "listed", [{"0": None}, {"x": SOURCES["0"]}, {"0": {"endpoint": 5, "publisher": "zmq"}}, {"ranks": [1]}]
)
async def test_event_sources_of_another_shape(serve, session, listed):
    facts = await probe(await serve(pages({**VLLM, "/kv_event_sources": listed})), session)
    assert facts.serving and facts.events() == [None] and "events" in facts.problems


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


@pytest.mark.parametrize(
    ("answer", "fault", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "refused", "does not speak HTTP as it should; correct the port in the URL"),
        (b"", "closed", "the connection broke: it was closed before the answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "closed", "the answer broke off"),
    ],
)
async def test_a_port_that_does_not_speak_http(session, answer, fault, said):
    async def hang_up(reader, writer):
        await reader.read(1)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        facts = await probe(f"http://127.0.0.1:{port}", session)
    assert not facts.alive and facts.fault == fault and said in facts.error


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


@pytest.mark.parametrize("looked_up, named", [(512, True), (0, False)])
async def test_slower_tiers_without_events_are_named(serve, session, looked_up, named):
    page = VLLM["/metrics"] + f'\nvllm:external_prefix_cache_queries_total{{engine="0"}} {looked_up}.0\n'
    facts = await probe(await serve(pages({**VLLM, "/metrics": page, "/kv_event_sources": {}})), session)
    said = problems_of(facts, None, [None])
    assert ("tiers" in said) is named and (not named or "--kv-events-config" in said["tiers"].remedy)
    given = EventSource("tcp://h:1", "tcp://h:2", "")
    assert "tiers" not in problems_of(facts, given, [given])
