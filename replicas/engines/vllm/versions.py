"""The differences in how versions of vLLM treat the same request.

Read in the sources of versions OLDEST to NEWEST; the prompts of 0.28 and 0.32 were compared token for token
(tests/vllm/test_tokens.py). The releases of transformers are those that each version's package requires.
"""

import re
from typing import Any

_NUMBER = re.compile(r"v?(\d+)\.(\d+)")
_ANY = (99, 0)
OLDEST, NEWEST = (0, 28), (0, 33)


def version_quirks(version: str | None) -> dict[str, Any]:
    """Return the fields of `VersionQuirks` for a version as /version gives it.

    A vLLM built from a source tree calls itself 0.1 or less. It counts as newer than NEWEST, as does an engine that
    does not report its version. In versions outside OLDEST to NEWEST, requests that the known versions refuse may be
    valid, so the engine decides.
    """
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
    """Return whether each process of this version hashes blocks with a random seed, unless PYTHONHASHSEED is set.

    0.28 does; later versions have a fixed seed (with the default algorithm).
    """
    match = _NUMBER.match(version or "")
    return match is not None and (0, 1) < (int(match[1]), int(match[2])) < (0, 29)


def takes_priority(version: str | None) -> bool:
    """Return whether this version accepts requests with a priority, even if it does not schedule by priority.

    0.28 to 0.33 do. By older sources, engine V0 refuses a priority unless it schedules by priority, and early V1 always
    refuses one.
    """
    match = _NUMBER.match(version or "")
    return match is not None and not (0, 1) < (int(match[1]), int(match[2])) < OLDEST


def finds_parts(version: str | None) -> bool:
    """Return whether hits may end within a block of full attention, with decode context parallelism.

    This is about models with Mamba layers, whose blocks are smaller then: 0.32 finds such hits, 0.28 only whole blocks.
    It is unknown for the versions in between, so whole blocks are assumed.
    """
    match = _NUMBER.match(version or "")
    return match is None or not (0, 1) < (int(match[1]), int(match[2])) < (0, 32)


def looks_to_end(version: str | None) -> bool:
    """Return whether the lookup of an engine with several cache groups includes the block that ends with the prompt.

    It matters only for engines that drop (recompute) the last block of each hit. 0.32 includes the block; by the
    sources, 0.28 to 0.31 limit the lookup to one token before the prompt's end.
    """
    match = _NUMBER.match(version or "")
    return match is None or not (0, 1) < (int(match[1]), int(match[2])) < (0, 32)


def has_series_of_connectors(version: str | None) -> bool:
    """Return whether /metrics of this version has the series of a KV connector from the start.

    False if the version is unknown: it may be another engine that uses vLLM's names.
    """
    match = _NUMBER.match(version or "")
    return match is not None and not (0, 1) < (int(match[1]), int(match[2])) < (0, 28)


def _transformers(number: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the oldest release of transformers that a version of vLLM supports, and the first that is too new."""
    if number < (0, 29):
        return (5, 5), _ANY
    if number < (0, 31):
        return (5, 10), _ANY
    known = {(0, 31): ((5, 10), (5, 18)), (0, 32): ((5, 16), (5, 20)), (0, 33): ((5, 16), (5, 21))}
    return known.get(number, ((5, 16), _ANY))
