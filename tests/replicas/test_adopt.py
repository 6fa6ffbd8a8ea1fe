import asyncio
import os
import re
import resource

import pytest

from replicas import adopt
from replicas.adopt import probe, problems_of
from replicas.launch.ports import pick
from replicas.replica import EventSource

from .conftest import answering

LLAMA = {"id": "llama", "root": "/models/llama", "parent": None, "max_model_len": 8192}
MODELS = {"data": [LLAMA, {"id": "sql", "root": "/adapters/sql", "parent": "llama", "max_model_len": None}]}
METRICS = """process_start_time_seconds 12.5
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0",num_gpu_blocks="100"} 1.0
vllm:num_requests_running{engine="0",model_name="llama"} 0.0
vllm:num_requests_waiting{engine="0",model_name="llama"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="llama"} 0.0
vllm:prefix_cache_queries_total{engine="0",model_name="llama"} 0.0
vllm:prefix_cache_hits_total{engine="0",model_name="llama"} 0.0
"""
TWO_RANKS = METRICS + "".join(line.replace('engine="0"', 'engine="1"') + "\n" for line in METRICS.splitlines()[1:])
SOURCE = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv@r0@llama"}
SOURCES = {"0": SOURCE | {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}}
VLLM = {"/health": "", "/v1/models": MODELS, "/version": {"version": "0.32.0"}, "/metrics": METRICS}
VLLM["/kv_event_sources"] = SOURCES


@pytest.fixture
def found(serve, session):
    """found(change) -> what is known of a vLLM whose pages are changed so."""

    async def found(change=None):
        return await probe(await serve(answering({**VLLM, **(change or {})})), session)

    return found


async def test_a_vllm_tells_everything(found):
    facts = await found()
    assert facts.alive and facts.serving and not facts.fault and not facts.problems
    assert facts.models == {"llama": None, "sql": "llama"} and facts.root == "/models/llama"
    assert (facts.max_model_len, facts.version) == (8192, "0.32.0")
    assert (facts.block_size, facts.num_blocks, facts.scrape.started) == (32, 100, 12.5)
    assert facts.events() == [EventSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv@r0@llama")]


@pytest.mark.parametrize("body", ["{}", "[]", "null", "<html>", '{"data": {}}', "\x00"])
async def test_a_mock_that_answers_everything_alike_is_served(serve, session, body):
    facts = await probe(await serve(answering({"*": body})), session)
    assert facts.alive and facts.serving and facts.models == {} and facts.events() == [None]
    assert set(facts.problems) == {"models", "metrics", "events"}


@pytest.mark.parametrize("data", [[], [{}], ["llama"], [{"id": 3}]])
async def test_no_model_listed_yet_is_not_serving(found, data):
    facts = await found({"/v1/models": {"data": data}})
    assert facts.alive and not facts.serving and not facts.fault
    assert ("ids that are no text" if data else "still loading") in facts.error


@pytest.mark.parametrize("length", [-5, True, "8192", 1.5])
async def test_a_context_that_no_model_has_is_not_believed(found, length):
    listed = {"data": [{"id": "llama", "max_model_len": length}, {"id": "other", "max_model_len": 4096}]}
    assert (await found({"/v1/models": listed})).max_model_len == 4096


@pytest.mark.parametrize("parent", [["llama"], {"id": "llama"}, 7, False, "x" * 2000])
async def test_an_adapter_of_nobody_knows_what_is_not_taken_for_the_base_model(found, parent):
    listed = {"data": [{"id": "sql", "root": "/adapters/sql", "parent": parent}, LLAMA]}
    facts = await found({"/v1/models": listed})
    assert (facts.models, facts.root, facts.adapter_roots) == ({"llama": None}, "/models/llama", {})


async def test_a_parent_without_a_name_is_none(found):
    facts = await found({"/v1/models": {"data": [LLAMA | {"parent": ""}]}})
    assert facts.serving and (facts.models, facts.root) == ({"llama": None}, "/models/llama")


async def test_of_a_catalogue_a_bounded_number_of_names_is_known(found, monkeypatch):
    monkeypatch.setattr(adopt, "MOST_NAMES", 3)
    facts = await found({"/v1/models": {"data": [{"id": f"m{number}"} for number in range(4)]}})
    assert list(facts.models) == ["m0", "m1", "m2"] and "more than 3 names" in facts.problems["models"].what


def published(port: int, replay: int | None) -> dict:
    return {**SOURCES["0"], "endpoint": f"tcp://*:{port}", "replay_endpoint": replay and f"tcp://*:{replay}"}


def renamed(old: str, new: str) -> dict:
    return {"/metrics": METRICS.replace(old, new)}


def sources(**changes) -> dict:
    return {"/kv_event_sources": {"0": SOURCES["0"] | changes}}


@pytest.mark.parametrize(
    "change, key, said",
    [
        ({"/v1/models": 401}, "models", "API key.*--engine-api-key"),
        ({"/metrics": 404}, "metrics", "set block_size"),
        ({"/metrics": "python_info 1.0\n"}, "metrics", "no vllm: series.*--disable-log-stats"),
        (renamed("cache_config_info", "kv"), "metrics", "no vllm:cache_config_info.*: block size and size of the"),
        (renamed("num_requests_waiting", "queued"), "metrics", "lacks vllm:num_requests_waiting:"),
        (renamed("num_gpu_blocks", "num_device_blocks"), "metrics", "newer Hitherto"),
        (renamed('caching="True"', 'caching="False"'), "caching", "--no-enable-prefix-caching"),
        ({"/kv_event_sources": 404}, "events", "URL#events=tcp://HOST:PORT"),
        ({"/kv_event_sources": 500}, "events", "answers 500"),
        ({"/kv_event_sources": {"x": SOURCES["0"]}}, "events", "--kv-events-config"),
        ({"/kv_event_sources": {"0": None}}, "events", "--kv-events-config"),
        (sources(enable_kv_cache_events=False), "events", "--kv-events-config"),
        (sources(publisher="null"), "events", "--kv-events-config"),
        (sources(endpoint="tcp://127.0.0.1:5557"), "events", r"--kv-events-config as tcp://\*:PORT"),
        (sources(endpoint=None), "events", "names no endpoint"),
        (sources(endpoint=5), "events", "names no endpoint"),
        (sources(endpoint="tcp://*:port"), "events", "cannot be connected to"),
        (sources(endpoint="tcp://*:99999"), "events", "cannot be connected to"),
        (sources(endpoint="inproc://*"), "events", "cannot be connected to"),
        (sources(endpoint="ipc:///" + "x" * 10_000), "events", "cannot be connected to"),
        (sources(replay_endpoint="tcp://a b:5558"), "events", "cannot be connected to"),
        (sources(replay_endpoint=None), "replay", '"replay_endpoint"'),
    ],
)
async def test_what_is_missing_or_wrong_is_named_with_its_remedy(found, change, key, said):
    facts = await found(change)
    assert facts.serving and list(facts.problems) == [key] and re.search(said, str(facts.problems[key]))
    assert facts.events() == [None] or key != "events"
    assert (facts.sources is None) is (change.get("/kv_event_sources") == 500), "one that does not answer is not gone"


async def test_only_a_vllm_that_is_known_to_takes_priorities(found):
    for version, takes in (("0.28.0", True), ("0.1.dev1+gabc", True), ("0.9.2", False), (None, False)):
        assert (await found({"/version": {"version": version}})).told.takes_priority is takes
    other = {"/version": {"version": "1.2.0"}, "/metrics": "other:requests 1\n"}
    assert not (await found(other)).told.takes_priority


async def test_each_rank_publishes_in_a_place_of_its_own(found):
    ranks = {"1": published(5601, 5611), "0": published(5600, 5610)}  # vLLM lists them as they came up
    for page in (TWO_RANKS, 404):
        facts = await found({"/metrics": page, "/kv_event_sources": ranks})
        ports = [one.endpoint[-4:] + one.replay[-5:] for one in facts.events()]
        assert facts.engines == (0, 1) and ports == ["5600:5610", "5601:5611"]


async def test_an_older_vllms_ranks_publish_one_port_further_each(found):
    facts = await found({"/metrics": TWO_RANKS, "/kv_event_sources": 404})
    given = EventSource("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5567", "")
    sources = facts.events(given)
    assert sources == [given, EventSource("tcp://10.0.0.7:5558", "tcp://10.0.0.7:5568", "")]
    assert not problems_of(facts, given, sources)


async def test_an_engine_that_is_one_of_several_ranks_keeps_its_number(found):
    """External load balancing: each rank has a URL of its own, and counts as the engine's number 3."""
    page = METRICS.replace('engine="0"', 'engine="3"')
    facts = await found({"/metrics": page, "/kv_event_sources": {"3": published(5603, 5613)}})
    assert facts.engines == (3,) and not facts.problems
    assert [one.endpoint for one in facts.events()] == ["tcp://127.0.0.1:5603"]


async def test_a_rank_without_events_is_named(found):
    facts = await found({"/metrics": TWO_RANKS})
    sources = facts.events()
    said = problems_of(facts, None, sources)["ranks"]
    assert sources[0] and sources[1] is None and "rank 1," in said.what
    ipc = EventSource("ipc:///tmp/kv", None, "")
    assert facts.events(ipc) == [ipc, None] and set(problems_of(facts, ipc, [ipc, None])) == {"ranks", "replay"}


async def test_ranks_that_a_probe_did_not_hear_of_are_not_gone(found):
    facts = await found({"/metrics": 503, "/kv_event_sources": 404})
    assert facts.engines == () and len(facts.events(None, 2)) == 2


async def test_the_operators_word_goes_before_the_engines(found):
    facts = await found({"/kv_event_sources": {}})
    given = EventSource("tcp://h:1", "tcp://h:2", "")
    assert facts.events(given) == [given] and not problems_of(facts, given, [given])
    assert "--kv-events-config" in problems_of(facts, None, [None])["events"].remedy


@pytest.mark.parametrize("looked_up, named", [(512, True), (0, False)])
async def test_slower_tiers_without_events_are_named(found, looked_up, named):
    page = METRICS + f'vllm:external_prefix_cache_queries_total{{engine="0"}} {looked_up}.0\n'
    facts = await found({"/metrics": page, "/kv_event_sources": {}})
    said = problems_of(facts, None, [None])
    assert ("tiers" in said) is named and (not named or "--kv-events-config" in said["tiers"].remedy)
    given = EventSource("tcp://h:1", "tcp://h:2", "")
    assert "tiers" not in problems_of(facts, given, [given])


@pytest.mark.parametrize(
    "path, status, fault, said",
    [
        ("/health", 503, "5xx", "503"),
        ("/health", 418, "refused", "OpenAI-compatible"),
        ("/v1/models", 500, "5xx", "answers 500"),
    ],
)
async def test_engines_that_answer_badly(found, path, status, fault, said):
    facts = await found({path: status})
    assert not facts.serving and facts.fault == fault and said in facts.error


async def test_an_engine_without_health_is_judged_by_its_models(found):
    facts = await found({"/health": 404})
    assert facts.alive and facts.serving and "sql" in facts.models


async def test_nobody_there(session):
    port = pick(1, "127.0.0.1", set())[0]
    facts = await probe(f"http://127.0.0.1:{port}", session)
    assert not facts.alive and facts.fault == "connect" and "nothing listens" in facts.error


async def test_no_such_host(session):
    facts = await probe("http://no-such-host.invalid:80", session)
    assert facts.fault == "connect" and "does not resolve" in facts.error


async def test_a_server_that_never_answers(engine, session):
    engine.hold.clear()
    facts = await probe(await engine(), session, deadline=0.1)
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
    url = await serve(answering(VLLM))
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
