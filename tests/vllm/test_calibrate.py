"""`loadgen calibrate` against a real engine: what it tells is read, and the fit is near what was seen."""

import asyncio
import sys

import pytest

from loadgen.calibrate.ask import Client
from replicas.simulated.profile import load_profile

from .engines import block_size, release


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine("--max-num-seqs", "24", blocks=1024).wait()


async def test_what_vllm_tells_of_itself(engine):
    async with Client(engine.url) as client:
        known = await client.learn(None)
        assert await client.at_work() == 0
    assert known.model == "tiny" and known.version.startswith(release())
    limits = known.limits
    assert (limits.num_blocks, limits.block_size, limits.max_num_seqs) == (1024, block_size(), 24)
    assert set(limits.told.values()) == {"reported by the engine"}
    assert known.machine and "unknown" not in known.machine


async def test_a_short_calibration(engine, tmp_path):
    out = tmp_path / "vllm.yaml"
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "loadgen", "calibrate", engine.url, "--seconds", "10", "--out", str(out),
                                                   stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)  # fmt: skip
    said, err = await asyncio.wait_for(process.communicate(), 110)
    assert process.returncode == 0, err.decode()
    assert b"WARNING" not in err and b"will send" in said
    profile = load_profile(out)
    assert profile.num_blocks == 1024 and profile.max_num_seqs == 24
    assert profile.step.attention > 0 and profile.step.base > 0.1
    alone = profile.step.seconds(0, 0.0, 1, 64, 0.0)
    assert 1e-4 < alone < profile.step.seconds(0, 0.0, 24, 24 * 64, 0.0) < 0.5
    first = profile.request.latency + profile.request.work
    assert 0.2 < first + 1e3 * profile.step.seconds(512, 512 * 256, 0, 0, 0.0) < 1000
