"""What SGLang tells of itself."""

import json

import pytest

from replicas.answer import Answer
from replicas.engines import DIALECTS, recognize
from replicas.engines.sglang import SGLANG
from replicas.engines.vllm import VLLM
from replicas.event_source import EventSource

INFO = {"model_path": "/models/m", "page_size": 1, "dp_size": 1, "max_total_num_tokens": 1000, "version": "0.5.23",
        "disable_radix_cache": False, "kv_events": None}  # fmt: skip
EVENTS = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv", "block_size": 1, "dp_size": 1,
          "replay_endpoint_port_base": 5560}  # fmt: skip


def answers(info=None, path="/server_info", metrics=b"", status=200):
    paths = ("/v1/models", "/version", *(path for dialect in DIALECTS for path in dialect.paths))
    found = {one: Answer(404, b"") for one in paths}
    if info is not None:
        found[path] = Answer(status, json.dumps(info).encode())
    return found | {"/metrics": Answer(200, metrics)}


@pytest.mark.parametrize("path", SGLANG.paths)
def test_it_is_recognized_by_what_it_tells(path):
    assert recognize(answers(INFO, path)) is SGLANG
    assert recognize(answers(metrics=b"\nsglang:num_running_reqs 0\n")) is SGLANG
    assert recognize(answers({"vllm_config": {"page_size": 1}}, path)) is VLLM
    assert recognize(answers(INFO, path, status=401)) is VLLM


SIZES = [(1, 16, 62), (None, 16, 62), (4, 16, 62), (3, 18, 55), (16, 16, 62), (64, 64, 15)]


@pytest.mark.parametrize(("page", "block", "blocks"), SIZES)
def test_blocks_are_of_whole_pages_and_sixteen_tokens_at_least(page, block, blocks):
    told = SGLANG.told(answers({**INFO, "page_size": page}))
    assert (told.block_size, told.num_blocks, told.page_size) == (block, blocks, page or 1)
    assert (told.version, told.root, told.prefix_caching) == ("0.5.23", "/models/m", True)


def test_events_are_of_the_pages_that_the_publisher_tells():
    """Where a page is spread over several devices."""
    told = SGLANG.told(answers({**INFO, "page_size": 8, "kv_events": {**EVENTS, "block_size": 32}}))
    assert (told.page_size, told.block_size) == (32, 32)


@pytest.mark.parametrize("mode", ["prefill", "decode", "null", None, ["decode"]])
def test_one_that_was_started_for_one_leg_is_told_of(mode):
    sources = SGLANG.event_sources(answers({**INFO, "disaggregation_mode": mode}), "gpu1")
    assert ("role" in sources.problems) == (mode in ("prefill", "decode"))


def test_each_rank_publishes_on_ports_of_its_own():
    sources = SGLANG.event_sources(answers({**INFO, "dp_size": 2, "kv_events": EVENTS}), "gpu1")
    zero = EventSource("tcp://gpu1:5557", "tcp://gpu1:5560", "kv")
    assert sources == ({0: zero, 1: EventSource("tcp://gpu1:5558", "tcp://gpu1:5561", "kv")}, {})


def test_versions_that_tell_only_how_they_were_started():
    given = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:7000", "topic": "kv"})
    by_rank, problems = SGLANG.event_sources(answers({**INFO, "kv_events_config": given}), "::1")
    assert by_rank == {0: EventSource("tcp://[::1]:7000", None, "kv")}
    assert "replay_endpoint" in problems["replay"].remedy


@pytest.mark.parametrize("described", [None, {**EVENTS, "endpoint_host": "collector", "endpoint_port_base": 7000}])
def test_a_publisher_that_connects_has_no_subscribers(described):
    """0.5.23 describes it like one that binds."""
    given = json.dumps({"publisher": "zmq", "endpoint": "tcp://collector:7000"})
    told = {**INFO, "kv_events": described, "kv_events_config": given}
    by_rank, problems = SGLANG.event_sources(answers(told), "gpu1")
    assert by_rank == {0: None} and "nobody can subscribe" in problems["events"].what


@pytest.mark.parametrize("host", [None, 7, {}])
def test_a_description_without_a_host_is_no_source(host):
    by_rank, problems = SGLANG.event_sources(answers({**INFO, "kv_events": EVENTS | {"endpoint_host": host}}), "gpu1")
    assert by_rank == {0: None} and "--kv-events-config" in problems["events"].remedy


@pytest.mark.parametrize(("status", "known"), [(0, None), (503, None), (401, {})])
def test_one_that_does_not_answer_is_asked_again(status, known):
    by_rank, problems = SGLANG.event_sources(answers(INFO, status=status), "gpu1")
    assert by_rank == known and "/server_info cannot be read" in problems["events"].what


def test_limits_of_its_scheduler():
    told = {"max_running_requests": 64, "chunked_prefill_size": 8192, "max_prefill_tokens": 16384}
    assert SGLANG.scheduler_limits(told) == {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
    assert SGLANG.scheduler_limits({**told, "chunked_prefill_size": -1})["max_num_batched_tokens"] == 16384
