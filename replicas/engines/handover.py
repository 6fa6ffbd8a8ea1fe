"""The parts of a request that make an engine hand a prompt's KV cache over: keep it for another, or fetch it there.

An engine obeys such a request: it answers with its own address and the ids of its blocks, reads the blocks of any
request regardless of their cache salt, and connects to any host and port. So these are reserved for the router, and a
gateway whose clients must not learn of each other accepts none from them. Read in the sources of vLLM 0.32, SGLang,
TensorRT-LLM and llm-d's sidecar. Each `Transfer` writes some of them.
"""

from collections.abc import Mapping

# Members of a request's JSON object.
FIELDS = (
    "kv_transfer_params", "ec_transfer_params",  # vLLM: of the KV cache, and of the encoder's
    "bootstrap_room", "bootstrap_host", "bootstrap_port", "bootstrap_pair_key", "disagg_prefill_dp_rank",  # SGLang
    "disaggregated_params",  # TensorRT-LLM
)  # fmt: skip
# Members that contain such members. vLLM reads those in `vllm_xargs`, and in `extra_args` at /inference/v1/generate, as
# its own arguments.
NESTED: Mapping[str, Mapping] = {"vllm_xargs": {}, "sampling_params": {"extra_args": {}}}
# Headers of llm-d's sidecar, by old and new names: the engines that do, or have done, a part of the work.
HEADERS = (
    b"x-prefiller-host-port", b"x-llm-d-prefiller-host-port",
    b"x-encoder-hosts-ports", b"x-llm-d-encoder-hosts-ports",
    b"x-kv-cache-source-host-port", b"x-llm-d-kv-cache-source-host-port",
    b"x-data-parallel-host-port",
)  # fmt: skip
# Within a request id, before addresses: vLLM's connectors P2pNccl and MoRIIO read its engines' addresses there.
IN_IDS = ("___prefill_addr_", "___decode_addr_")
