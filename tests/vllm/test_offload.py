"""The payloads that tests/replicas/engines/vllm has recorded are those of this vLLM."""

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RECORDED = json.loads((HERE.parent / "replicas/engines/vllm/offload_events.json").read_text())


def test_what_the_offloading_connector_tells_is_as_recorded(vllm_python):
    said = subprocess.run(
        [vllm_python, "-c", "import importlib.metadata as m; print(m.version('vllm'))"], capture_output=True, text=True
    )
    version = said.stdout.strip().partition("+")[0]
    if version not in RECORDED:
        pytest.skip(f"nothing is recorded of vLLM {version}")
    run = subprocess.run(
        [vllm_python, HERE / "offload_events.py"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1]) == RECORDED[version]
