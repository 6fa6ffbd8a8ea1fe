"""Every `vllm serve` that the documents show and compose.gpu.yaml runs, read by vLLM's own argument parser."""

import json
import subprocess
from pathlib import Path

import pytest

from ..deploy.test_compose import GPUS, ROOT, compose
from ..test_commands import ALL, words

pytestmark = pytest.mark.exact
SHOWN = [(page, words(command)[2:]) for page, command in ALL if command.startswith("vllm serve ")]
STARTED = [
    (ROOT / GPUS, service["command"])
    for service in compose(GPUS)["services"].values()
    if service.get("entrypoint") == ["vllm", "serve"]
]


def test_vllm_takes_what_the_documents_show(vllm_python, model):
    """With a model that is here in place of the one that is named, and ports for those that are placeholders."""
    given = [[str(model), *flags] for _, (_, *flags) in [*SHOWN, *STARTED]]
    done = subprocess.run(
        [vllm_python, Path(__file__).with_name("parser.py")], input=json.dumps(given), capture_output=True, text=True, check=True
    )  # fmt: skip
    verdicts = json.loads(done.stdout.splitlines()[-1])["verdicts"]  # 0.28 logs before it
    assert len(verdicts) >= 6
    refused = {
        f"{page.name}: {flags}": one["refused"]
        for (page, flags), one in zip([*SHOWN, *STARTED], verdicts)
        if "refused" in one
    }
    assert not refused
