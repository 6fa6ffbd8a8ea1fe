"""What a vLLM launch profile says of its engines' KV caches: connectors, speculators, and traits that must be alike.

Read in the sources of 0.32.0 (`distributed/kv_transfer/kv_connector/v1`).
"""

from __future__ import annotations

from typing import Any

from replicas.engines.vllm.fields import Fields
from replicas.launch.command import Ports
from replicas.pairing import Traits

# The transports of NIXL's UCX: RDMA if available, else TCP; zero-copy from 16 KiB on, and small messages over one rail.
# Without a list it also tries transports for which vLLM's memory is not registered.
UCX_GPU = {
    "UCX_TLS": "rc,rdmacm,cuda_copy,cuda_ipc,tcp",
    "UCX_RNDV_THRESH": "16384",
    "UCX_MAX_EAGER_RAILS": "1",
}
UCX_CPU = {"UCX_TLS": "tcp,self,sm,cma"}
# The connectors that the gateway supports: those with which decoders fetch, and prefillers do not push. By vLLM's name
# the id of the transfer in `replicas.engines.TRANSFERS`.
CONNECTORS = {"NixlConnector": "nixl", "NixlPullConnector": "nixl", "MooncakeConnector": "mooncake"}
SEVERAL = "MultiConnector"
# Speculators that read the model's hidden states and have a cache of their own.
WITH_HIDDEN_STATES = ("eagle", "eagle3", "mtp", "dflash", "dspark")
# LMCache keeps a cache that was pushed to a decoder until the decoder asks for it, and reports its arrival to one fixed
# address: so no request can be given up, or moved to another decoder (docs/disaggregation.md, "Limits").
BESIDE_LMCACHE = (
    "use NixlConnector to move caches; LMCache can go on offloading behind it, as the second of the `connectors` of a "
    f"{SEVERAL} (docs/disaggregation.md)"
)


def names(fields: Fields) -> list[str]:
    """Return the names of the connectors that engines with these fields are started with.

    A MultiConnector is replaced by its parts. If `kv_offloading_size` is set, vLLM uses the offloading connector in
    place of any other.
    """
    config = fields.kv_transfer_config
    if fields.kv_offloading_size is not None:
        return ["LMCacheMPConnector" if fields.kv_offloading_backend == "lmcache" else "OffloadingConnector"]
    if config is None:
        return []
    if config.kv_connector != SEVERAL:
        return [config.kv_connector]
    inner = config.kv_connector_extra_config.get("connectors")
    return [str(one.get("kv_connector")) for one in inner if isinstance(one, dict)] if isinstance(inner, list) else []


def transfer_of(fields: Fields) -> str:
    """Return the id of the transfer by which the gateway can let these engines pass caches on, or ""."""
    return next((CONNECTORS[name] for name in names(fields) if name in CONNECTORS), "")


def environment(transfer: str, host: str, ports: Ports, on_cpu: bool) -> dict[str, str]:
    """Return the environment variables of a connector's side channel, where other engines fetch caches.

    With NIXL data-parallel rank r listens on the port `ports.side` + r; one Mooncake server serves all ranks.
    """
    if transfer == "mooncake":
        return {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(ports.side), "PYTHONHASHSEED": "0"}
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side)}
    return side | {"PYTHONHASHSEED": "0"} | (UCX_CPU if on_cpu else UCX_GPU)


def no_transfer(fields: Fields) -> str:
    """Return why engines of this profile pass no prompt's KV cache on, with a remedy; "" if they do."""
    if fields.kv_transfer_config is None:
        return "its engines pass no cache on: add `kv_transfer_config: {kv_connector: NixlConnector}` to the profile"
    if transfer_of(fields):
        return ""
    has = ", ".join(names(fields)) or f"{SEVERAL} without connectors"
    said = f"the gateway moves caches by none but {', '.join(CONNECTORS)}, and its kv_connector is {has}"
    return f"{said}: {BESIDE_LMCACHE}" if "LMCache" in has else said


def traits(fields: Fields) -> Traits:
    """Return the traits that a profile sets for its engines; those that it does not set are None."""
    given = _speculator(fields)
    speculator = {name: given[name] for name in sorted(given) if name != "num_speculative_tokens"}
    return Traits(
        dtype=None if fields.dtype == "auto" else fields.dtype,
        kv_cache_dtype=None if fields.kv_cache_dtype == "auto" else fields.kv_cache_dtype,
        attention_backend=fields.attention_backend,
        speculative_config=str(speculator) if drops_block(fields) else None,
        block_size=fields.block_size,
    )


def drops_block(fields: Fields) -> bool | None:
    """Return whether engines of this profile recompute the last block of a cache hit.

    They do if their speculator needs the model's hidden states; names such as deepseek_mtp count too. None if the
    profile names no method of speculation: the files of the model or of its draft, or flags that the gateway does not
    read, may give the engine a speculator.
    """
    method = _speculator(fields).get("method")
    return str(method).endswith(WITH_HIDDEN_STATES) if method else None


def _speculator(fields: Fields) -> dict[str, Any]:
    """Return the speculator's settings by vLLM's names, from `speculative_config` and from flags of their own."""
    flags = {"method": fields.spec_method, "model": fields.spec_model}
    settings = {name.replace("-", "_"): value for name, value in (fields.speculative_config or {}).items()}
    return settings | {name: value for name, value in flags.items() if value is not None}
