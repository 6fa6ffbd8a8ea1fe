"""The reader of /kv_event_sources, which lists the publishers of KV events (vLLM 0.31 and newer)."""

from replicas.addresses import check_endpoint
from replicas.answer import Answer
from replicas.event_source import EventSource
from replicas.names import bracketed
from replicas.problems import EVENTS_BY_HAND, EVENTS_OFF, NO_REPLAY, Problem, Remedies

PATH = "/kv_event_sources"


def read(
    answer: Answer, host: str, remedies: Remedies
) -> tuple[dict[int, EventSource | None] | None, dict[str, Problem]]:
    """Return the KV event sources by data-parallel rank, and problems by subject.

    The sources are None if `answer`, from /kv_event_sources, is a failure. `host`: the engine's host as clients reach
    it.
    """
    if answer.status == 0 or answer.status >= 500:
        why = f"{PATH} cannot be read ({answer.error or f'answers {answer.status}'})"
        return None, {"events": Problem(why, f"give the address as {EVENTS_BY_HAND}")}
    sources: dict[int, EventSource | None] = {}
    problems: dict[str, Problem] = {}
    listed = answer.json() if answer.status == 200 else {}
    for rank, config in listed.items():
        if not (rank.isdigit() and isinstance(config, dict)):
            continue
        source, problem = _source(config, host, remedies)
        sources[int(rank)] = source
        if problem:
            problems["events"] = problem
        elif source.replay is None and source.snapshot is None:
            problems["replay"] = Problem(NO_REPLAY, remedies.replay)
    if not sources and answer.status != 200:
        problems["events"] = Problem(
            f"{PATH} answers {answer.status} (older engines have none), so no KV events are known and the cache is guessed",
            remedies.unlisted,
        )
    elif not sources:
        problems["events"] = Problem(EVENTS_OFF, remedies.events)
    return sources, problems


def _source(config: dict, host: str, remedies: Remedies) -> tuple[EventSource | None, Problem | None]:
    """Return the source for one publisher's settings, or the problem with them."""
    endpoint = config.get("endpoint")
    if config.get("enable_kv_cache_events") is False or config.get("publisher") == "null":
        return None, Problem(EVENTS_OFF, remedies.events)
    if not isinstance(endpoint, str):
        return None, Problem("/kv_event_sources names no endpoint", "give it as URL#events=tcp://HOST:PORT")
    if not _binds(endpoint):
        return None, Problem(
            f"KV events go to {endpoint}, which vLLM connects to rather than binds (no * in it), so nobody can subscribe",
            remedies.binding,
        )
    replay, topic, snapshot = (config.get(name) for name in ("replay_endpoint", "topic", "snapshot_endpoint"))
    source = EventSource(
        _reachable(endpoint, host),
        _reachable(replay, host) if isinstance(replay, str) else None,
        topic if isinstance(topic, str) else "",
        _reachable(snapshot, host) if isinstance(snapshot, str) else None,
    )
    try:
        check_endpoint(source.endpoint)
        for further in (source.replay, source.snapshot):
            if further is not None:
                check_endpoint(further)
    except ValueError as error:
        return None, Problem(
            f"/kv_event_sources names an endpoint that cannot be connected to: {error}", f"give it as {EVENTS_BY_HAND}"
        )
    return source, None


def _binds(endpoint: str) -> bool:
    """Return whether vLLM binds an endpoint rather than connects to it, by the rule that 0.32 was seen to follow."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _reachable(endpoint: str, host: str) -> str:
    """Return an endpoint with which a client can connect: in one such as `tcp://*:5557`, `*` becomes `host`."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    bound, _, port = rest.rpartition(":")
    if bound not in ("*", "0.0.0.0", "::", "[::]"):
        return endpoint
    return f"tcp://{bracketed(host)}:{port}"
