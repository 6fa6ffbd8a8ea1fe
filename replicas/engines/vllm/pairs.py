"""Which vLLM engines can fetch a prompt's cache from which others. Pure: fields in, reasons out.

vLLM compares these itself, at the first transfer, and the request fails then (read in 0.32.0: NIXL's compatibility hash
of version, model, types, backend and speculator; block sizes and parallel sizes when two engines first meet).
"""

from __future__ import annotations

from replicas.engines.vllm.fields import Fields

# Whose parameters are those that the dialect's `Transfer` writes and reads: decoders fetch, nobody pushes.
CONNECTORS = ("NixlConnector", "NixlPullConnector", "MultiConnector")
# Speculators that read the model's hidden states, and have a cache of their own.
WITH_HIDDEN_STATES = ("eagle", "eagle3", "mtp", "dflash", "dspark")


def no_transfer(one: Fields) -> str:
    """Why its engines pass no prompt's cache on; "" if they do."""
    if one.kv_transfer_config is None:
        return "its engines pass no cache on: add `kv_transfer_config: {kv_connector: NixlConnector}` to the profile"
    if (connector := one.kv_transfer_config.kv_connector) not in CONNECTORS:
        return f"the gateway moves caches by none but {', '.join(CONNECTORS)}, and its kv_connector is {connector}"
    return ""


def unlike(prefiller: Fields, decoder: Fields, its_version: str | None, version: str | None) -> list[str]:
    """What keeps engines of `decoder` from fetching from those of `prefiller`; with the versions of vLLM that they
    start, where known."""
    compared = {
        "kv_cache_dtype": (prefiller.kv_cache_dtype or "auto", decoder.kv_cache_dtype or "auto"),
        "dtype": (prefiller.dtype or "auto", decoder.dtype or "auto"),
        "attention_backend": (prefiller.attention_backend or "not set", decoder.attention_backend or "not set"),
        "speculative_config": (_speculator(prefiller), _speculator(decoder)),
        "executable": (
            (f"of vLLM {its_version}", f"of vLLM {version}") if its_version and version else ("the same",) * 2
        ),
    }
    found = [
        f"{name} is {one} in one and {other} in the other: vLLM moves caches only where it is the same"
        for name, (one, other) in compared.items()
        if one != other
    ]
    theirs, ours = prefiller.block_size, decoder.block_size
    if theirs and ours and ours % theirs:
        found.append(f"block_size {ours} of the decoder is no multiple of the prefiller's {theirs}")
    return found


def _speculator(one: Fields) -> str:
    speculative = one.speculative_config
    if speculative is None or not (speculative.method or "").endswith(WITH_HIDDEN_STATES):  # also deepseek_mtp
        return "not set"
    return str(speculative.model_dump(exclude_defaults=True, exclude={"num_speculative_tokens"}))
