"""What a request says of a peer pull is what this vLLM reads."""

import json
import subprocess
from pathlib import Path

import pytest

from replicas.engines.vllm.transfer import pull_from_peer

from .engines import folder, version


def test_the_source_that_a_request_names_is_the_one_that_vllm_asks(vllm_python):
    if version()[:2] < (0, 32) or not list(folder().glob("lib/python3*/site-packages/nixl")):
        pytest.skip("needs vLLM 0.32 with nixl in its environment: tests/vllm/install.sh")
    body = json.loads(pull_from_peer(b'{"prompt": "x"}', "10.0.0.7:5711", "abc"))
    run = subprocess.run(
        [vllm_python, Path(__file__).parent / "peer_pull.py", json.dumps(body["kv_transfer_params"])],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "id": "abc",
        "peer": "10.0.0.7:5711",
        "probes": True,  # what is not there is computed, and nothing fails
        "dest": None,  # the replica keeps nothing for others because of this
    }
