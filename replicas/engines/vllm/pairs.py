"""Which vLLM engines can fetch a prompt's KV cache from which others, by the fields of their launch profiles. No I/O.

vLLM itself compares engines at the first transfer between them, and fails the request if they differ (read in 0.32.0:
NIXL's compatibility hash of version, model, types, backend and speculator; then block sizes and parallel sizes).
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
# LMCache keeps a cache that was pushed to a decoder until the decoder asks for it, and reports its arrival to one fixed
# address: so no request can be given up, or moved to another decoder (docs/disaggregation.md, "Limits").
BESIDE_LMCACHE = (
    "use NixlConnector to move caches; LMCache can go on offloading behind it, as the second of the `connectors` of a "
    f"{SEVERAL} (docs/disaggregation.md)"
)


def no_transfer(one: Fields) -> str:
    """Return why engines of this profile pass no prompt's KV cache on, with a remedy; "" if they do."""
    if one.kv_transfer_config is None:
        return "its engines pass no cache on: add `kv_transfer_config: {kv_connector: NixlConnector}` to the profile"
    if connector_of(one) is None:
        has = ", ".join(names(one)) or f"{SEVERAL} without connectors"
        said = f"the gateway moves caches by none but {', '.join(CONNECTORS)}, and its kv_connector is {has}"
        return f"{said}: {BESIDE_LMCACHE}" if any(name.startswith("LMCache") for name in names(one)) else said
    return ""


def not_installed(one: Fields, executable: str, packages: Mapping[str, str]) -> str:
    """Return why the profile's connector cannot run for lack of a package; "" if it can or if this is unknown.

    `executable`: the vLLM command; `packages`: those installed in its environment, {} if unknown.
    """
    connector = connector_of(one)
    if connector is None or not packages or connector.package in packages:
        return ""
    return (
        f"its connector {', '.join(names(one))} needs the package {connector.package}, which is not installed beside "
        f"{executable}: `pip install {connector.install}` in that environment"
    )


def unlike(prefiller: Fields, decoder: Fields, its_version: str | None, version: str | None) -> list[str]:
    """Return why engines of profile `decoder` cannot fetch caches from engines of profile `prefiller`; [] if they can.

    `its_version`: the prefiller's version of vLLM; `version`: the decoder's; None if unknown.
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
    """Return the traits that a profile sets for its engines; those that it does not set are None."""
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
    """Return the traits that engines of this profile start with; one that is not set gets a mark for vLLM's default."""
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
    """Return whether engines of this profile recompute the last block of a cache hit.

    They do if their speculator needs the model's hidden states. None if the profile names no method of speculation: the
    files of the model or of its draft, or flags that the gateway does not read, may give the engine a speculator.
    """
    return _has_hidden_states(one) if _speculator(one).get("method") else None


def _has_hidden_states(one: Fields) -> bool:
    """Return whether the profile's speculator reads the model's hidden states; names such as deepseek_mtp count too."""
    return str(_speculator(one).get("method")).endswith(WITH_HIDDEN_STATES)


def _speculator(one: Fields) -> dict[str, Any]:
    """Return the speculator's settings by vLLM's names, from `speculative_config` and from flags of their own."""
    flags = {"method": one.spec_method, "model": one.spec_model}
    settings = {name.replace("-", "_"): value for name, value in (one.speculative_config or {}).items()}
    return settings | {name: value for name, value in flags.items() if value is not None}
