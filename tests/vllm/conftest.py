"""The vLLM these tests ask. They are no part of `make test`: an environment has 2.3 GB."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """vLLM's own interpreter, in the environment that HITHERTO_VLLM names."""
    given = os.environ.get("HITHERTO_VLLM")
    if not given:
        pytest.skip("needs a vLLM: `make test-vllm` installs one and runs this, HITHERTO_VLLM names another's folder")
    return Path(given) / "bin" / "python"
