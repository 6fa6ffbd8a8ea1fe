"""An engine that speculates with an EAGLE head: what is predicted is what it reports, from the first answer on."""

import json
import shutil

import pytest

from .engines import gateway, tiny_model
from .test_groups import report, shorter
from .traffic import caught_up, drive, share_equal, wrong
from .witness import Witness

REQUESTS = 120


@pytest.fixture(scope="module")
def engine(start_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    model, head = tiny_model(folder / "tiny"), folder / "head"
    shutil.copytree(model, head)
    (head / "model.safetensors").unlink()
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    speculator = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    flags = ["--speculative-config", json.dumps(speculator), "--load-format", "dummy", "--max-model-len", "1024"]
    started = start_engine(*flags, "--max-num-batched-tokens", "256", model=model, blocks=160)
    yield started.wait()
    started.stop()


async def test_every_prediction_is_what_the_engine_reports(engine):
    witness = Witness(engine)
    async with gateway(engine) as process:
        outcomes = await drive(process, REQUESTS, shorter, between=lambda _: caught_up(process, witness))
    witness.close()
    print(report(outcomes))
    assert share_equal(outcomes) == 1, wrong(outcomes)
    assert sum(one.cached > 0 for one in outcomes) > REQUESTS / 3
