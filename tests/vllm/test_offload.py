"""The payloads that tests/replicas/engines/vllm has recorded are those of this vLLM."""

import json
from pathlib import Path

import pytest

from .engines import by_vllm, release

RECORDED = json.loads((Path(__file__).parents[1] / "replicas/engines/vllm/offload_events.json").read_text())


def test_what_the_offloading_connector_tells_is_as_recorded(vllm):
    if release() not in RECORDED:
        pytest.skip(f"nothing is recorded of vLLM {release()}")
    told = by_vllm("offload_events.py", env={"PYTHONHASHSEED": "0"})
    assert json.loads(told[-1]) == RECORDED[release()]
