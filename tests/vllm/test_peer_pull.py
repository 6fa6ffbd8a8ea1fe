"""What a request says of a peer pull is what vLLM's p2p tier reads.

The connector itself needs a GPU, see `offload_events`; who reads the parameters does not.
"""

import json

from replicas.engines.vllm.transfer import pull_from_peer

from .engines import by_vllm
from .pd import needs_nixl

READ = """import json, sys
from vllm.v1.kv_offload.tiering.p2p.manager import _parse_dest, _parse_source
given = json.loads(sys.argv[1])
source = _parse_source(given)
print(json.dumps([source.kv_request_id, source.peer_id, source.do_probe, _parse_dest(given)]))"""


def test_the_source_that_a_request_names_is_the_one_that_vllm_asks(vllm):
    needs_nixl()
    body = json.loads(pull_from_peer(b'{"prompt": "x"}', "10.0.0.7:5711", "abc"))
    id, peer, probes, destination = json.loads(by_vllm("-c", READ, json.dumps(body["kv_transfer_params"]))[-1])
    assert (id, peer) == ("abc", "10.0.0.7:5711")
    assert probes, "what is not there is computed, and nothing fails"
    assert destination is None, "the replica keeps nothing for others because of this"
