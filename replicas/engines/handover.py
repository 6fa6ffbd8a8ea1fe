"""What of a request tells an engine to hand a prompt's cache over: to keep it for another one, or to fetch it there.

An engine does as such a request says: it answers with its own address and the ids of its blocks, reads blocks of
whatever request without a look at the salt that they were cached with, and connects to any host and port. So these are
for whoever decides between engines, and a gateway whose clients must not learn of each other takes none of theirs.
Read in the sources of vLLM 0.32, SGLang, TensorRT-LLM and llm-d's sidecar. Each `Transfer` writes some of them.
"""

from collections.abc import Mapping

# Members of a request's JSON object.
FIELDS = (
    "kv_transfer_params", "ec_transfer_params",  # vLLM: of the KV cache, and of the encoder's
    "bootstrap_room", "bootstrap_host", "bootstrap_port", "bootstrap_pair_key", "disagg_prefill_dp_rank",  # SGLang
    "disaggregated_params",  # TensorRT-LLM
)  # fmt: skip
# Members that have such members in their turn. vLLM takes what is in `vllm_xargs`, and in `extra_args` at
# /inference/v1/generate, for its own arguments.
NESTED: Mapping[str, Mapping] = {"vllm_xargs": {}, "sampling_params": {"extra_args": {}}}
# Headers of llm-d's sidecar, in its old and its new names: engines that it asks, or has asked, for a part of the work.
HEADERS = (
    b"x-prefiller-host-port", b"x-llm-d-prefiller-host-port",
    b"x-encoder-hosts-ports", b"x-llm-d-encoder-hosts-ports",
    b"x-kv-cache-source-host-port", b"x-llm-d-kv-cache-source-host-port",
    b"x-data-parallel-host-port",
)  # fmt: skip
# In a request's id, before addresses: vLLM's connectors P2pNccl and MoRIIO read there which engines it is for.
IN_IDS = ("___prefill_addr_", "___decode_addr_")
