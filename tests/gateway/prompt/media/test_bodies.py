"""Blocks of requests with images are named as a real vLLM's events name them, see `bodies`."""

import pytest

from .bodies import compare, recordings
from .vision_model import tiny_qwen2_vl


@pytest.mark.parametrize("version, answers", [pytest.param(*one, id=one[0]) for one in recordings()])
def test_blocks_are_those_that_vllm_made(version, answers, tmp_path):
    found = compare(tiny_qwen2_vl(tmp_path / "model"), version, answers)
    assert found.wrong == [] and not found.declined
    assert len(found.equal) == sum(blocks is not None for blocks in answers.values()) > 100
