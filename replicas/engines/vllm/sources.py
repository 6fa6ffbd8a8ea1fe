"""The reader of /kv_event_sources, which lists the publishers of KV events (vLLM 0.31 and newer)."""

from typing import Any

from replicas.answer import Answer
from replicas.engines.dialect import Sources
from replicas.event_source import EventSource, reported
from replicas.problems import EVENTS_BY_HAND, EVENTS_OFF, NO_REPLAY, Problem, Remedies

PATH = "/kv_event_sources"


def read(answer: Answer, host: str, remedies: Remedies) -> Sources:
    """Return each data-parallel rank's KV event source, and problems, from an answer of /kv_event_sources.

    If the answer is a failure, the result has no sources (`by_rank` is None). `host`: the engine's host as clients
    reach it.
    """
    if answer.status == 0 or answer.status >= 500:
        why = f"{PATH} cannot be read ({answer.error or f'answers {answer.status}'})"
        return Sources(None, {"events": Problem(why, f"give the address as {EVENTS_BY_HAND}")})
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
        elif source and source.replay is None:
            problems["replay"] = Problem(NO_REPLAY, remedies.replay)
    if not sources and answer.status != 200:
        what = f"{PATH} answers {answer.status} (older engines have none), so no KV events are known and the cache is guessed"
        problems["events"] = Problem(what, remedies.unlisted)
    elif not sources:
        problems["events"] = Problem(EVENTS_OFF, remedies.events)
    return Sources(sources, problems)


def _source(config: dict[str, Any], host: str, remedies: Remedies) -> tuple[EventSource | None, Problem | None]:
    """Return (source, None) for the settings of one publisher of KV events, or (None, problem) if it cannot be used."""
    endpoint = config.get("endpoint")
    if config.get("enable_kv_cache_events") is False or config.get("publisher") == "null":
        return None, Problem(EVENTS_OFF, remedies.events)
    if not isinstance(endpoint, str):
        return None, Problem(f"{PATH} names no endpoint", f"give it as {EVENTS_BY_HAND}")
    # The rule by which 0.32 was seen to bind an endpoint rather than to connect to it.
    if not ("*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))):
        what = f"KV events go to {endpoint}, which vLLM connects to rather than binds (no * in it)"
        return None, Problem(f"{what}, so nobody can subscribe", remedies.binding)
    try:
        return reported(endpoint, config.get("replay_endpoint"), config.get("topic"), host), None
    except ValueError as error:
        what = f"{PATH} names an endpoint that cannot be connected to: {error}"
        return None, Problem(what, f"give it as {EVENTS_BY_HAND}")
