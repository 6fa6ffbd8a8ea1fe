"""Run by vLLM's interpreter: what its p2p tier reads out of a request's parameters, as JSON on stdout.

The connector itself needs a GPU, see `offload_events`; who reads the parameters does not.
"""

import json
import sys

from vllm.v1.kv_offload.tiering.p2p.manager import _parse_dest, _parse_source

given = json.loads(sys.argv[1])
source = _parse_source(given)
print(
    json.dumps(
        {"id": source.kv_request_id, "peer": source.peer_id, "probes": source.do_probe, "dest": _parse_dest(given)}
    )
)
