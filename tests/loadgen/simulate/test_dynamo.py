"""The engine model against Dynamo's: what its offline replay (1.6.1, one worker, 16,384 blocks) says of small traces,
the ones that once told both apart."""

import json
import random
from itertools import count
from statistics import fmean

import pytest

from loadgen.simulate import Setting, simulate
from loadgen.workload.datasets import DATASETS
from replicas.simulated.profile import load_profile

names = count()
SHARED = [next(names) for _ in range(100)]


def asked(at, tokens, output, blocks=None):
    """One line of Mooncake's format; its blocks are its own unless given."""
    own = [next(names) for _ in range(-(-tokens // 512))]
    return {"timestamp": at, "input_length": tokens, "output_length": output, "hash_ids": blocks or own}


@pytest.mark.parametrize(
    "trace, ttft, tpot",
    [
        # what a prompt has that is still computed is not read by those that decode: counted for them, the mean TTFT is
        # 914 ms
        ([asked(0, 1000, 300), asked(100, 80_000, 2)], 872.790, 15.759),
        # more than the cache holds, so requests wait, and are begun again
        ([asked(100 * i, 65_000, 200) for i in range(5)], 5418.498, 42.489),
        ([asked(50 * i, 6000, 600) for i in range(38)] + [asked(3000, 60_000, 200)], 2370.297, 37.888),
        # what ten share is read for each, and what is read at most, for all together, is the cache
        (
            [asked(0, 51_200, 2, SHARED)] + [asked(3000 + 100 * i, 51_200, 2000, SHARED) for i in range(9)],
            156.313,
            32.148,
        ),
    ],
    ids=["long prompt beside a decode", "too long for the cache", "too many for the cache", "shared"],
)
def test_steps_take_what_dynamos_replay_says(tmp_path, trace, ttft, tpot):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in trace))
    work = DATASETS["mooncake"](random.Random(0), None, dataset_path=path)
    done = simulate(work, Setting("round_robin", [load_profile("gpu-8b", num_blocks=16_384)])).done
    assert 1e3 * fmean(record.ttft for record in done) == pytest.approx(ttft, rel=5e-4)
    assert 1e3 * fmean(record.tpot for record in done) == pytest.approx(tpot, rel=5e-4)
