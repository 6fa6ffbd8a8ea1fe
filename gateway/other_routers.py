"""Flags and policies of other routers that are none here, and what to give instead: the best known ones of
docs/migrating.md of which a guess by likeness would be wrong or missing. The page has more, such as families of flags
(`--cb-*`) and flags that have no counterpart (`--enable-igw`)."""

_ROLES = "--replica-url URL#role=prefill URL#role=decode"
_NO_WEIGHTS = "nothing, there are no weights to set"
_LEARNED = "nothing, ranks are learned from the engine"
_STATES = "nothing, the states of a replica follow from requests and probes"
FLAGS = {
    "--prefill": _ROLES,
    "--decode": _ROLES,
    "--pd-disaggregation": _ROLES,
    "--kv-connector": "#transfer=mooncake behind the URLs, or nothing for NIXL",
    "--cache-threshold": _NO_WEIGHTS,
    "--balance-abs-threshold": _NO_WEIGHTS,
    "--balance-rel-threshold": _NO_WEIGHTS,
    "--eviction-interval-secs": "--cache-budget",
    "--max-tree-size": "--cache-budget",
    "--intra-node-data-parallel-size": _LEARNED,
    "--dp-aware": _LEARNED,
    "--max-payload-size": "--max-body-bytes",
    "--request-timeout-secs": "--request-timeout-s and --idle-timeout-s",
    "--max-concurrent-requests": "--slo or --admission",
    "--queue-size": "--slo or --admission",
    "--queue-timeout-secs": "--slo or --admission",
    "--retry-max-retries": "--retries",
    "--disable-retries": "--retries 0",
    "--disable-circuit-breaker": _STATES,
    "--worker-startup-timeout-secs": "nothing, engines are found when they are up",
    "--api-key": "--engine-api-key @FILE for what engines ask for, --api-keys FILE for clients' keys",
    "--service-discovery": "--discover",
    "--service-discovery-port": "--discover",
    "--service-discovery-namespace": "--discover",
    "--selector": "--discover",
    "--prometheus-host": "--admin-host",
    "--prometheus-port": "--admin-port",
    "--shutdown-grace-period-secs": "--drain-timeout-s",
    "--tls-cert-path": "--tls-cert",
    "--tls-key-path": "--tls-key",
    "--model-path": "--model",
    "--tokenizer-path": "--model",
}
POLICIES = {
    "cache_aware": "leave --policy out, or give prefix_affinity for that rule on exact tokens",
    "rendezvous_hash": "give consistent_hash",
    "consistent_hashing": "give consistent_hash",
    "prefix_hash": "give consistent_hash",
    "manual": "give consistent_hash",
    "bucket": "leave --policy out, long and short prompts are told apart by their predicted time",
}


def flag_answer(word: str) -> str:
    """About another router's flag; "" if it is none that is known."""
    said = FLAGS.get(word)
    return (
        f"unknown argument {word!r}, which is another router's. Here it is {said} (docs/migrating.md)" if said else ""
    )


def policy_answer(name: object) -> str:
    """About another router's policy; "" if it is none that is known."""
    said = POLICIES.get(name) if isinstance(name, str) else None
    return f"{name!r} is another router's policy: {said} (docs/migrating.md)" if said else ""
