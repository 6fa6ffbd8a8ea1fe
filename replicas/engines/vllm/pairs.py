"""Which vLLM engines can fetch a prompt's cache from which others. Pure: fields in, reasons out.

vLLM itself compares these at the first transfer, and then fails the request (read in 0.32.0: NIXL's compatibility hash
of version, model, types, backend and speculator; block sizes and parallel sizes when two engines first meet).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicas.engines.vllm.connectors import CONNECTORS, MOONCAKE, NIXL, SEVERAL, connector_of, names
from replicas.engines.vllm.fields import Fields
from replicas.pairing import Traits, refusals

# Speculators that read the model's hidden states and have a cache of their own.
WITH_HIDDEN_STATES = ("eagle", "eagle3", "mtp", "dflash", "dspark")
NOT_SET = "not set"
# LMCache keeps what was pushed to a decoder until the decoder asks for it, and reports to one address when it arrived:
# no request can be given up or moved (docs/disaggregation.md, "Limits").
BESIDE_LMCACHE = (
    "use NixlConnector to move caches; LMCache can go on offloading behind it, as the second of the `connectors` of a "
    f"{SEVERAL} (docs/disaggregation.md)"
)


def no_transfer(one: Fields) -> str:
    """Return why its engines pass no prompt's cache on; "" if they do."""
    if one.kv_transfer_config is None:
        return "its engines pass no cache on: add `kv_transfer_config: {kv_connector: NixlConnector}` to the profile"
    if connector_of(one) is None:
        has = ", ".join(names(one)) or f"{SEVERAL} without connectors"
        said = f"the gateway moves caches by none but {', '.join(CONNECTORS)}, and its kv_connector is {has}"
        return f"{said}: {BESIDE_LMCACHE}" if any(name.startswith("LMCache") for name in names(one)) else said
    return ""


def not_installed(one: Fields, executable: str, packages: Mapping[str, str]) -> str:
    """Return why its connector cannot run with the packages installed for `executable`; "" if no reason is known."""
    connector = connector_of(one)
    if connector is None or not packages or connector.package in packages:
        return ""
    return (
        f"its connector {', '.join(names(one))} needs the package {connector.package}, which is not installed beside "
        f"{executable}: `pip install {connector.install}` in that environment"
    )


def unlike(prefiller: Fields, decoder: Fields, its_version: str | None, version: str | None) -> list[str]:
    """Return what keeps engines of `decoder` from fetching from those of `prefiller`.

    `its_version` and `version`: the vLLM of the prefiller and of the decoder, where known.
    """
    found = refusals(_started(prefiller, its_version), _started(decoder, version))
    if connector_of(prefiller) is not connector_of(decoder):
        one, other = (", ".join(names(fields)) or "none" for fields in (prefiller, decoder))
        found.append(f"kv_connector is {one} in one and {other} in the other: give both the same")
    if connector_of(decoder) is NIXL and decoder.pipeline_parallel_size > 1:
        found.append(
            f"vLLM moves caches to engines of one pipeline stage only, and the decoder's pipeline_parallel_size is "
            f"{decoder.pipeline_parallel_size}: use tensor_parallel_size in its place"
        )
    if connector_of(decoder) is MOONCAKE:
        found += _unlike_of_mooncake(prefiller, decoder)
    return found


def declared(one: Fields) -> Traits:
    """Return the traits that a profile gives its engines; unset ones are unknown."""
    given = _speculator(one)
    speculator = {name: given[name] for name in sorted(given) if name != "num_speculative_tokens"}
    return Traits(
        dtype=None if one.dtype == "auto" else one.dtype,
        kv_cache_dtype=None if one.kv_cache_dtype == "auto" else one.kv_cache_dtype,
        attention_backend=one.attention_backend,
        speculative_config=str(speculator) if _has_hidden_states(one) else None,
        block_size=one.block_size,
    )


def _started(one: Fields, version: str | None) -> Traits:
    """Return the traits that engines of this profile are started with; unset ones get vLLM's default, alike in all."""
    said = declared(one)._asdict()
    unset = dict.fromkeys(("dtype", "kv_cache_dtype"), "auto") | dict.fromkeys(
        ("attention_backend", "speculative_config"), NOT_SET
    )
    return Traits(**said | {name: said[name] or value for name, value in unset.items()} | {"version": version})


def _unlike_of_mooncake(prefiller: Fields, decoder: Fields) -> list[str]:
    found = []
    one, other = prefiller.tensor_parallel_size, decoder.tensor_parallel_size
    if max(one, other) % min(one, other):
        found.append(f"tensor_parallel_size is {one} in one and {other} in the other: one must divide the other")
    for side, fields, wrong in (("prefiller", prefiller, "kv_consumer"), ("decoder", decoder, "kv_producer")):
        if fields.kv_transfer_config is not None and fields.kv_transfer_config.kv_role == wrong:
            found.append(f"kv_role of the {side} is {wrong}, and Mooncake keeps to it: leave it at kv_both")
    return found


def drops_block(one: Fields) -> bool | None:
    """Return whether these engines recompute the last block of a cache hit, for the speculator's hidden states.

    None if the profile names no method: the files of the model or of its draft, or flags that the gateway does not
    read, may give the engine a speculator.
    """
    return _has_hidden_states(one) if _speculator(one).get("method") else None


def _has_hidden_states(one: Fields) -> bool:
    """Return whether its speculator reads the model's hidden states, as deepseek_mtp does too."""
    return str(_speculator(one).get("method")).endswith(WITH_HIDDEN_STATES)


def _speculator(one: Fields) -> dict[str, Any]:
    """Return the speculator's settings by vLLM's names, which `speculative_config` or flags of their own give."""
    flags = {"method": one.spec_method, "model": one.spec_model}
    settings = {name.replace("-", "_"): value for name, value in (one.speculative_config or {}).items()}
    return settings | {name: value for name, value in flags.items() if value is not None}
