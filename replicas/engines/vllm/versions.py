"""The differences in how versions of vLLM treat the same request.

Read in the sources of versions 0.28 (OLDEST) to 0.33 (NEWEST). The prompts of 0.28 and 0.32 were compared token for
token (tests/vllm/test_tokens.py). The releases of transformers are those that each version's package requires.
"""

import re
from typing import Any

_NUMBER = re.compile(r"v?(\d+)\.(\d+)")
_ANY = (99, 0)
OLDEST, NEWEST = (0, 28), (0, 33)


def _number(version: str | None) -> tuple[int, int] | None:
    """Return the major and minor number of a version, as /version gives it, or None if the text has no such numbers.

    The result is None also for a vLLM built from a source tree, which calls itself 0.1 or less. Callers treat it as
    newer than every known version.
    """
    match = _NUMBER.match(version or "")
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    return number if number > (0, 1) else None


def version_quirks(version: str | None) -> dict[str, Any]:
    """Return how a version of vLLM prepares prompts: a dict of fields of `gateway.prompt.quirks.VersionQuirks`.

    `version`: as /version gives it. For versions outside OLDEST to NEWEST, whose sources were not read, the gateway
    does not refuse requests itself, since such an engine may accept them.
    """
    number = _number(version)
    if number is None:
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
    return (_number(version) or NEWEST) < (0, 29)


def is_known(version: str | None) -> bool:
    """Return whether this version of vLLM is OLDEST (0.28) or newer; False if no version is reported.

    Such versions accept requests with a priority, even if they do not schedule by it, and their /metrics has the series
    of a KV connector from the start. Older versions may refuse a priority: by their sources, engine V0 unless it
    schedules by priority, and early V1 always. An engine without a version may be another one that only uses vLLM's
    names.
    """
    return _NUMBER.match(version or "") is not None and (_number(version) or NEWEST) >= OLDEST


def finds_all(version: str | None) -> bool:
    """Return whether prefix cache lookups in this version of vLLM (0.32 or newer) find hits that older ones miss.

    First, with decode context parallelism, blocks of Mamba layers are smaller than those of full attention. Then 0.32
    finds hits that end within a block of full attention, where 0.28 finds only whole blocks.
    Second, in an engine with several cache groups (kinds of layers), 0.32 also looks up the block that ends with the
    prompt. By their sources, 0.28 to 0.31 stop one token before the prompt's end. This matters for engines that
    recompute the last block of each hit.
    """
    return (_number(version) or NEWEST) >= (0, 32)


def _transformers(number: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the oldest release of transformers that a version of vLLM supports, and the first that is too new."""
    if number < (0, 29):
        return (5, 5), _ANY
    if number < (0, 31):
        return (5, 10), _ANY
    known = {(0, 31): ((5, 10), (5, 18)), (0, 32): ((5, 16), (5, 20)), (0, 33): ((5, 16), (5, 21))}
    return known.get(number, ((5, 16), _ANY))
