"""By what trtllm-serve is recognized, and what it tells."""

import json

import pytest

from replicas.answer import Answer
from replicas.engines import recognize
from replicas.engines.tensorrt_llm import TRTLLM_SERVE
from replicas.engines.vllm import VLLM

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "tensorrt_llm"}]}
SERIES = b"""# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{model_name="m",engine_type="pytorch"} 2.0
trtllm_kv_cache_max_blocks{model_name="m",engine_type="pytorch"} 1000.0
trtllm_kv_cache_tokens_per_block{model_name="m",engine_type="pytorch"} 64.0
"""


def answers(**given: Answer) -> dict[str, Answer]:
    paths = ("/v1/models", "/version", "/metrics", "/prometheus/metrics", "/server_info", "/get_server_info",
             "/kv_event_sources")  # fmt: skip
    named = {"models": "/v1/models", "version": "/version", "series": "/prometheus/metrics"}
    return {path: Answer(404) for path in paths} | {named[key]: answer for key, answer in given.items()}


def said(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode())


@pytest.mark.parametrize("given", [{"models": said(MODELS)}, {"series": Answer(200, SERIES)}])
def test_it_is_recognized_by_its_name_or_its_series(given):
    assert recognize(answers(**given)) is TRTLLM_SERVE


def test_others_are_not_taken_for_it():
    assert recognize(answers(models=said({"data": [{"id": "m", "owned_by": "vllm"}]}))) is VLLM
    assert recognize(answers(models=said([]))) is VLLM


def test_what_it_tells_of_its_cache():
    told = TRTLLM_SERVE.told(answers(version=said({"version": "1.2.0"}), series=Answer(200, SERIES)))
    assert (told.version, told.block_size, told.num_blocks) == ("1.2.0", 64, 1000)


def test_before_its_first_iteration_its_blocks_are_the_usual_ones():
    page = SERIES.replace(b"64.0", b"0.0").replace(b"1000.0", b"0.0")
    told = TRTLLM_SERVE.told(answers(series=Answer(200, page)))
    assert (told.block_size, told.num_blocks) == (32, None)


def test_its_events_are_below_its_own_url():
    sources = TRTLLM_SERVE.event_sources(answers(models=said(MODELS)), "ignored")
    (source,) = sources.by_rank.values()
    assert source.below("http://gpu1:8000").endpoint == "http://gpu1:8000/kv_cache_events"
    assert source.below("http://gpu1:8000").hands_out_once and "replay" in sources.problems
