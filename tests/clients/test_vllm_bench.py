"""`vllm bench serve` against the gateway: needs the vLLM that HITHERTO_VLLM names; `make test-clients` names one."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT


@pytest.fixture
def vllm() -> Path:
    if "HITHERTO_VLLM" not in os.environ:
        pytest.skip("needs a vLLM: `make test-vllm` installs one, HITHERTO_VLLM names its folder")
    return Path(os.environ["HITHERTO_VLLM"])


@pytest.mark.parametrize("backend, path", [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_all_requests_succeed(gateway, vllm, tmp_path, backend, path):
    write = "from replicas.simulated.model import sim_model_dir; import shutil, sys; shutil.copytree(sim_model_dir(), sys.argv[1])"
    subprocess.run([os.environ["HITHERTO_PYTHON"], "-c", write, tmp_path / "model"], check=True, cwd=ROOT)
    # --endpoint is relative to --base-url
    done = subprocess.run(
        [vllm / "bin" / "vllm", "bench", "serve", "--backend", backend, "--base-url", gateway.url, "--endpoint", path,
         "--model", "sim", "--tokenizer", tmp_path / "model", "--dataset-name", "prefix_repetition",
         "--prefix-repetition-prefix-len", "512", "--prefix-repetition-suffix-len", "32",
         "--prefix-repetition-num-prefixes", "4", "--prefix-repetition-output-len", "8", "--num-prompts", "40",
         "--request-rate", "20", "--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (40, 0)
    assert gateway.counted("hitherto_reported_cached_tokens_total") > 30 * 400
