"""What vLLM's versions make differently of the same request.

Read in the sources of OLDEST to NEWEST; 0.28 and 0.32 were compared token for token (tests/vllm/test_tokens.py). The
releases of transformers are those that the metadata of each version's package asks for.
"""

import re
from typing import Any

_NUMBER = re.compile(r"v?(\d+)\.(\d+)")
_ANY = (99, 0)
OLDEST, NEWEST = (0, 28), (0, 33)


def version_quirks(version: str | None) -> dict[str, Any]:
    """`version` as /version says it. What runs from a source tree calls itself 0.1 or less: it counts as newer than
    NEWEST, as does what does not tell its version. What the versions that were read refuse, others may take: for those
    it is left to the engine."""
    match = _NUMBER.match(version or "")
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    if number <= (0, 1):
        return {"chats_known": None, "refuses_alike": False}
    as_now = True if number >= (0, 32) else False if number < (0, 29) else None
    return {
        "chats_known": False if number < OLDEST else True if number <= NEWEST else None,
        "refuses_alike": OLDEST <= number <= NEWEST,
        "tokenizes_all": number >= (0, 33),
        "deepseek_v41_results_continue": number >= (0, 33),
        "follows_namespaces": number >= (0, 33),
        "leaves_one": number >= (0, 33),
        "arguments_are_objects": number >= (0, 29),
        "looks_into_macros": number >= (0, 30),
        "asks_template": number >= (0, 31),
        "drops_attribution": number >= (0, 32),
        "harmony_recipient_last": as_now,
        "deepseek_v4": as_now,
        "shows_custom_tools": as_now,
        "media_identity": "framed" if as_now else "plain" if as_now is False else None,
        "truncates_to_output": number < (0, 32),
        "forwards_past_media": number < (0, 32),
        "transformers": _transformers(number),
    }


def has_random_hash_seed(version: str | None) -> bool:
    """0.28 hashes blocks with a seed of its process unless PYTHONHASHSEED is set, later versions with a fixed one (with
    the default algorithm)."""
    match = _NUMBER.match(version or "")
    return match is not None and (0, 1) < (int(match[1]), int(match[2])) < (0, 29)


def takes_priority(version: str | None) -> bool:
    """Return whether this version takes a request's priority, and ignores it where it does not schedule by it: so do
    0.28 to 0.33. In older sources V0 refuses one unless it schedules by priority, and early V1 refuses any."""
    match = _NUMBER.match(version or "")
    return match is not None and not (0, 1) < (int(match[1]), int(match[2])) < OLDEST


def finds_parts(version: str | None) -> bool:
    """Whether hits end within a block of full attention with decode context parallelism, where Mamba's blocks are
    smaller: 0.32 finds that, 0.28 whole blocks only. Of those between it is not known, so less is promised."""
    match = _NUMBER.match(version or "")
    return match is None or not (0, 1) < (int(match[1]), int(match[2])) < (0, 32)


def looks_to_end(version: str | None) -> bool:
    """Whether an engine that drops a block of each hit finds the block that ends with the prompt, where it has several
    cache groups. 0.32 does. The sources of 0.28 to 0.31 keep that lookup one token below the prompt's end."""
    match = _NUMBER.match(version or "")
    return match is None or not (0, 1) < (int(match[1]), int(match[2])) < (0, 32)


def has_series_of_connectors(version: str | None) -> bool:
    """Whether /metrics has a KV connector's series from the start. What does not tell its version may be something
    else that has vLLM's names."""
    match = _NUMBER.match(version or "")
    return match is not None and not (0, 1) < (int(match[1]), int(match[2])) < (0, 28)


def _transformers(number: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The oldest release, and the one before which it has to be."""
    if number < (0, 29):
        return (5, 5), _ANY
    if number < (0, 31):
        return (5, 10), _ANY
    known = {(0, 31): ((5, 10), (5, 18)), (0, 32): ((5, 16), (5, 20)), (0, 33): ((5, 16), (5, 21))}
    return known.get(number, ((5, 16), _ANY))
