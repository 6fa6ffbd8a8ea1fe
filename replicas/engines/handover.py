"""The parts of a request that make an engine keep a prompt's KV cache for another engine, or fetch it from another.

An engine obeys a request with such parts: it answers with its own address and the ids of its blocks, reads the blocks
of any request regardless of their cache salt, and connects to any host and port. So only the gateway may write these
parts (each `Transfer` writes some), and a gateway whose clients must not learn of each other accepts none from clients.
Read in the sources of vLLM 0.32, SGLang, TensorRT-LLM and llm-d's sidecar.
"""

from collections.abc import Mapping
from typing import Any

# Members of a request's JSON object.
FIELDS = (
    "kv_transfer_params", "ec_transfer_params",  # vLLM: of the KV cache, and of the encoder's
    "bootstrap_room", "bootstrap_host", "bootstrap_port", "bootstrap_pair_key", "disagg_prefill_dp_rank",  # SGLang
    "disaggregated_params",  # TensorRT-LLM
)  # fmt: skip
# Members that may contain such members: vLLM reads members of `vllm_xargs`, and of `extra_args` at
# /inference/v1/generate, as its own arguments.
NESTED: Mapping[str, Any] = {"vllm_xargs": {}, "sampling_params": {"extra_args": {}}}
# Headers of llm-d's sidecar, by old and new names; each names the engines that compute a part of the request, or that
# have computed it.
HEADERS = (
    b"x-prefiller-host-port", b"x-llm-d-prefiller-host-port",
    b"x-encoder-hosts-ports", b"x-llm-d-encoder-hosts-ports",
    b"x-kv-cache-source-host-port", b"x-llm-d-kv-cache-source-host-port",
    b"x-data-parallel-host-port",
)  # fmt: skip
# Marks within a request id: vLLM's connectors P2pNccl and MoRIIO read the addresses of engines after them.
IN_IDS = ("___prefill_addr_", "___decode_addr_")
