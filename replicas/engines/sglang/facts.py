"""The facts in SGLang's /server_info, which older versions call /get_server_info.

The answer has the server's arguments, and the figures that its schedulers reported when they were ready.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from replicas.addresses import check_endpoint
from replicas.answer import Answer
from replicas.engines.dialect import Sources, Told
from replicas.event_source import EventSource
from replicas.metrics import MOST_RANKS
from replicas.names import bracketed
from replicas.problems import EVENTS_BY_HAND, EVENTS_OFF, NO_REPLAY, Problem, Remedies

PATHS = ("/server_info", "/get_server_info")
BLOCK = 16  # least tokens of a block of the map: smaller pages are combined to such blocks
# Fields of a body that affect the prompt and that the gateway does not read as SGLang does, and fields of vLLM that
# SGLang ignores. SGLang's cache keys cover `extra_key` and `lora_path`, but its KV events do not report these.
UNFOLLOWED = frozenset(
    """
    extra_key lora_path session_params task reasoning reasoning_effort continue_final_message input_embeds
    add_generation_prompt add_special_tokens chat_template documents kv_transfer_params prompt_embeds
    truncate_prompt_tokens truncation truncation_side
    """.split()
)
WILDCARDS = ("*", "0.0.0.0", "::", "[::]")


def info(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """Return the answer at /server_info; {} if there is none, or if it is from another kind of engine."""
    for path in PATHS:
        told = answers[path].json() if answers[path].status == 200 else {}
        if "page_size" in told and "max_total_num_tokens" in told:
            return told
    return {}


def told(answers: Mapping[str, Answer]) -> Told:
    found = info(answers)
    if not found:
        return Told()
    events = found.get("kv_events")
    page = _number(events.get("block_size") if isinstance(events, dict) else None) or _number(found["page_size"]) or 1
    block = page * -(-BLOCK // page)
    tokens, path = _number(found["max_total_num_tokens"]), found.get("model_path")
    version = found.get("version")
    return Told(
        version if isinstance(version, str) else None,
        path if isinstance(path, str) else None,
        block,
        tokens // block if tokens else None,
        page,
        found.get("disable_radix_cache") is not True,
    )


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 1 << 40 else None


def sources(answers: Mapping[str, Answer], host: str, remedies: Remedies) -> Sources:
    """Return where each data-parallel rank publishes KV events: at the first rank's ports plus the rank's number.

    `host`: the engine's host as clients reach it.
    """
    found = info(answers)
    if not found:
        asked = answers[PATHS[0]]
        why = f"{PATHS[0]} cannot be read ({asked.error or f'answers {asked.status}'})"
        return Sources(
            None if asked.status == 0 or asked.status >= 500 else {}, {"events": Problem(why, remedies.unlisted)}
        )
    ranks = min(_number(found.get("dp_size")) or 1, MOST_RANKS + 1)  # one more than are accepted
    problems = _half(found.get("disaggregation_mode"))
    try:
        configured = _configured(found.get("kv_events_config"), host)
        first = _described(found.get("kv_events"), host) or configured
    except ValueError as error:
        return Sources(dict.fromkeys(range(ranks)), problems | {"events": Problem(str(error), remedies.binding)})
    if first is None:
        return Sources(dict.fromkeys(range(ranks)), problems | {"events": Problem(EVENTS_OFF, remedies.events)})
    if first.replay is None:
        problems["replay"] = Problem(NO_REPLAY, remedies.replay)
    return Sources({rank: first.at_rank(rank) for rank in range(ranks)}, problems)


def _half(mode: Any) -> dict[str, Problem]:
    """Return the problem that the engine was started for prefill or decode only, under "role"; {} if it was not."""
    if mode not in ("prefill", "decode"):  # "null" for neither
        return {}
    what = f"it was started with --disaggregation-mode {mode}, so it refuses every request that names no bootstrap room"
    return {"role": Problem(what, "start SGLang without --disaggregation-mode: nobody here names such rooms")}


def _described(told: Any, host: str) -> EventSource | None:
    """Return the KV event source that newer versions describe in /server_info (`told`), or None.

    The description does not say whether the publisher binds its address or connects to it; `_configured` finds out.
    """
    if not isinstance(told, dict) or told.get("publisher") != "zmq":
        return None
    where, port, replay = (
        told.get(f"{name}") for name in ("endpoint_host", "endpoint_port_base", "replay_endpoint_port_base")
    )
    if not isinstance(where, str) or not _number(port):
        return None
    at = _reachable(where, host)
    topic = told.get("topic")
    return _checked(
        EventSource(
            f"{at}:{port}", f"{at}:{replay}" if _number(replay) else None, topic if isinstance(topic, str) else ""
        )
    )


def _configured(given: Any, host: str) -> EventSource | None:
    """Return the KV event source from the engine's flag --kv-events-config (`given`), or None.

    Raises ValueError if the publisher connects to its address, instead of binding it, so that nobody can subscribe.
    """
    try:
        config = orjson.loads(given) if isinstance(given, str) else None
    except ValueError:
        return None
    if not isinstance(config, dict) or config.get("publisher") != "zmq":
        return None
    endpoint, replay = config.get("endpoint") or "tcp://*:5557", config.get("replay_endpoint")
    where = _host(endpoint)
    if where is not None and where not in WILDCARDS and "::" not in where and config.get("bind") is not True:
        raise ValueError(
            f"KV events go to {endpoint}, which SGLang connects to rather than binds, so nobody can subscribe"
        )
    topic = config.get("topic")
    return _checked(
        EventSource(
            _endpoint(endpoint, host),
            _endpoint(replay, host) if isinstance(replay, str) else None,
            topic if isinstance(topic, str) else "",
        )
    )


def _host(endpoint: str) -> str | None:
    """Return the host of a TCP endpoint, None for an endpoint of another kind."""
    scheme, _, rest = endpoint.partition("://")
    return rest.rpartition(":")[0] if scheme == "tcp" else None


def _endpoint(endpoint: str, host: str) -> str:
    where = _host(endpoint)
    return endpoint if where is None else f"{_reachable(where, host)}:{endpoint.rpartition(':')[2]}"


def _reachable(bound: str, host: str) -> str:
    return f"tcp://{bracketed(host) if bound in WILDCARDS else bound}"


def _checked(source: EventSource) -> EventSource:
    for endpoint in (source.endpoint, source.replay):
        if endpoint is not None:
            try:
                check_endpoint(endpoint)
            except ValueError as error:
                raise ValueError(
                    f"its KV events are at an endpoint that cannot be connected to: {error}; give it as {EVENTS_BY_HAND}"
                ) from None
    return source
