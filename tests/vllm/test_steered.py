"""Fields and template variables by which a client steers the rendering: of what vLLM takes the gateway makes the same
ids, or says that it does not know them. vLLM's own serving classes are asked, without an engine."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from replicas.engines.vllm.versions import version_quirks
from replicas.simulated.model import sim_model_dir

from ..gateway.prompt.reference import model_dir
from .bodies import RESPONSES
from .engines import ENVIRONMENT, tiny_model, version
from .odd_bodies import STEERED

pytestmark = pytest.mark.exact

RENDERING = Path(__file__).with_name("rendering.py")
NAMES = ("sim", "qwen3", "llama3_2")
CONTEXT = 131_072


@pytest.fixture(scope="module")
def rendered(vllm_python, tmp_path_factory) -> dict[str, tuple[Path, dict[str, list[int] | None]]]:
    """Per model its folder, and by body the ids; None where vLLM refuses it."""
    store = tmp_path_factory.mktemp("steered")
    bodies = {name: case for name, case in STEERED.items() if case[0] != RESPONSES or version() >= (0, 30)}
    folders = {
        name: tiny_model(store / name, Path(sim_model_dir()) if name == "sim" else model_dir(name)) for name in NAMES
    }
    jobs, results, log = store / "jobs", store / "results", store / "log"
    jobs.write_text("".join(json.dumps({
        "folder": str(folder), "chat_template": None, "bodies": list(bodies.values())
    }) + "\n" for folder in folders.values()))  # fmt: skip
    with log.open("w") as out:
        code = subprocess.call(
            [vllm_python, RENDERING, jobs, results], stdout=out, stderr=out, env={**os.environ, **ENVIRONMENT}
        )
    assert code == 0, log.read_text()[-3000:]
    told = [[one.get("ids") for one in json.loads(line)] for line in results.read_text().splitlines()]
    return {name: (folders[name], dict(zip(bodies, ids, strict=True))) for name, ids in zip(NAMES, told, strict=True)}


@pytest.mark.parametrize("model", NAMES)
def test_the_gateway_makes_the_same_ids_of_what_vllm_takes(rendered, model):
    folder, theirs = rendered[model]
    pipeline = Pipeline(folder, "tiny", 16, max_model_len=CONTEXT)
    pipeline.follow(version_quirks(".".join(map(str, version()))))
    equal, declined, wrong = [], [], []
    for name, ids in theirs.items():
        if ids is None:
            continue
        path, body = STEERED[name]
        try:
            prompt = pipeline.prepare(path, json.dumps(body).encode())
        except ApiError as error:
            wrong.append((name, str(error)))
            continue
        same = prompt.mode == "exact" and memoryview(prompt.token_ids).cast("I").tolist() == ids
        (equal if same else wrong if prompt.mode == "exact" else declined).append(name)
    assert not wrong
    # whether a null reaches the template is not certain of every version, and the demo model's names the role
    assert all(name.startswith("developer") for name in declined), declined
    assert len(equal) >= 40
