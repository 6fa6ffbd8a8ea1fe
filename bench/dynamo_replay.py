"""One run of NVIDIA Dynamo's offline replay, as `bench.dynamo` starts it with the Python that has Dynamo:

    VENV/bin/python -P bench/dynamo_replay.py TRACE ROUTER_MODE BLOCKS SPEED REPLICAS

-P, since `bench.dynamo` has the name of the package. Its default engine (the mocker's) with 16-token blocks; prints the summary as JSON.
"""

import json
import os
import sys

os.environ.setdefault("DYN_LOG", "error")
from dynamo._core import _normalize_mocker_config  # noqa: E402
from dynamo.replay import run_trace_replay  # noqa: E402

trace, mode, blocks, speed, replicas = sys.argv[1:]
engine = _normalize_mocker_config({})
engine["engine"].update(num_gpu_blocks=int(blocks), block_size=16)
told = run_trace_replay(trace, extra_engine_args=engine, num_workers=int(replicas), router_mode=mode,
                        arrival_speedup_ratio=float(speed), trace_block_size=512).summary  # fmt: skip
print(json.dumps(told))
