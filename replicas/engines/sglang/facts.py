"""The facts in SGLang's /server_info, which older versions call /get_server_info.

The answer has the server's arguments, and the figures that its schedulers reported when they were ready.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from replicas.answer import Answer
from replicas.engines.dialect import Sources, Told
from replicas.event_source import WILDCARDS, EventSource, reported
from replicas.metrics import MOST_RANKS
from replicas.problems import EVENTS_BY_HAND, EVENTS_OFF, NO_REPLAY, Problem, Remedies

PATHS = ("/server_info", "/get_server_info")
BLOCK = 16  # the gateway combines pages into blocks of at least so many tokens
# Fields of a body that affect the prompt and that the gateway does not read as SGLang does, and fields of vLLM that
# SGLang ignores. SGLang's cache keys cover `extra_key` and `lora_path`, but its KV events do not report these.
UNFOLLOWED = frozenset(
    """
    extra_key lora_path session_params task reasoning reasoning_effort continue_final_message input_embeds
    add_generation_prompt add_special_tokens chat_template documents kv_transfer_params prompt_embeds
    truncate_prompt_tokens truncation truncation_side
    """.split()
)


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
    tokens, caching = _number(found["max_total_num_tokens"]), found.get("disable_radix_cache") is not True
    version, root = (one if isinstance(one := found.get(name), str) else None for name in ("version", "model_path"))
    return Told(version, root, block, tokens // block if tokens else None, page, caching)


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
        unread = asked.status == 0 or asked.status >= 500
        return Sources(None if unread else {}, {"events": Problem(why, remedies.unlisted)})
    ranks = range(min(_number(found.get("dp_size")) or 1, MOST_RANKS + 1))  # one more than are accepted
    problems, mode = {}, found.get("disaggregation_mode")
    if mode in ("prefill", "decode"):  # "null" for neither
        what = f"it was started with --disaggregation-mode {mode}, so it refuses every request that names no bootstrap room"
        remedy = "start SGLang without --disaggregation-mode: nobody here names such rooms"
        problems["role"] = Problem(what, remedy)
    try:
        first = _source(found, host)
    except ValueError as error:
        return Sources(dict.fromkeys(ranks), problems | {"events": Problem(str(error), remedies.binding)})
    if first is None:
        return Sources(dict.fromkeys(ranks), problems | {"events": Problem(EVENTS_OFF, remedies.events)})
    if first.replay is None:
        problems["replay"] = Problem(NO_REPLAY, remedies.replay)
    return Sources({rank: first.at_rank(rank) for rank in ranks}, problems)


def _source(found: Mapping[str, Any], host: str) -> EventSource | None:
    """Return the first rank's KV event source, or None if there is none.

    Newer versions describe it in /server_info, but only the flag --kv-events-config says whether the publisher binds
    its address. Raises ValueError if the publisher connects instead of binding, so that nobody can subscribe, or if
    clients cannot connect to its endpoint.
    """
    told, given = found.get("kv_events"), found.get("kv_events_config")
    try:
        config = orjson.loads(given) if isinstance(given, str) else None
    except ValueError:
        config = None
    endpoint = replay = topic = None
    if isinstance(config, dict) and config.get("publisher") == "zmq":
        endpoint, replay = str(config.get("endpoint") or "tcp://*:5557"), config.get("replay_endpoint")
        topic, bound = config.get("topic"), endpoint.removeprefix("tcp://").rpartition(":")[0]
        binds = "::" in bound or bound in WILDCARDS or config.get("bind") is True
        if endpoint.startswith("tcp://") and not binds:
            what = f"KV events go to {endpoint}, which SGLang connects to rather than binds"
            raise ValueError(f"{what}, so nobody can subscribe")
    told = told if isinstance(told, dict) and told.get("publisher") == "zmq" else {}
    where, ports = told.get("endpoint_host"), [_number(told.get(f"{one}endpoint_port_base")) for one in ("", "replay_")]
    if isinstance(where, str) and ports[0]:
        endpoint, replay = (f"tcp://{where}:{port}" if port else None for port in ports)
        topic = told.get("topic")
    if endpoint is None:
        return None
    try:
        return reported(endpoint, replay, topic, host)
    except ValueError as error:
        what = f"its KV events are at an endpoint that cannot be connected to: {error}"
        raise ValueError(f"{what}; give it as {EVENTS_BY_HAND}") from None
