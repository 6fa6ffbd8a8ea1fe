"""The differences in how versions of vLLM treat the same request.

Read in the sources of versions OLDEST to NEWEST; the prompts of 0.28 and 0.32 were compared token for token
(tests/vllm/test_tokens.py). The releases of transformers are those that each version's package requires.
"""

import re
from typing import Any

_NUMBER = re.compile(r"v?(\d+)\.(\d+)")
_ANY = (99, 0)
OLDEST, NEWEST = (0, 28), (0, 33)


def _number(version: str | None) -> tuple[int, int] | None:
    """Return the major and minor number of a version, as /version gives it, or None if it does not tell them.

    A vLLM built from a source tree calls itself 0.1 or less. The result is None for it too, and it counts as newer than
    NEWEST.
    """
    match = _NUMBER.match(version or "")
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    return number if number > (0, 1) else None


def version_quirks(version: str | None) -> dict[str, Any]:
    """Return how a version of vLLM, as /version gives it, prepares prompts: fields of `VersionQuirks`.

    Versions outside OLDEST to NEWEST may accept requests that the known versions refuse, so the gateway leaves it to
    the engine to refuse them.
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
    """Return whether this version of vLLM is OLDEST or newer; False for a version that is not known.

    Versions from OLDEST on accept requests with a priority, even if they do not schedule by priority, and their
    /metrics has the series of a KV connector from the start. (By older sources, engine V0 refuses a priority unless it
    schedules by it, and early V1 always.) An engine without a known version may only use vLLM's names.
    """
    return _NUMBER.match(version or "") is not None and (_number(version) or NEWEST) >= OLDEST


def finds_all(version: str | None) -> bool:
    """Return whether prefix cache lookups in this version find two kinds of hits that older versions miss.

    With decode context parallelism, blocks of Mamba layers are smaller than those of full attention. There 0.32 finds
    hits that end within a block of full attention; 0.28 finds only whole blocks. And in an engine with several cache
    groups (kinds of layers) 0.32 looks up the block that ends with the prompt, too. By the sources, 0.28 to 0.31 stop
    one token before the prompt's end, which matters for engines that drop (recompute) the last block of each hit.
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
