"""Problems with an engine, each with its remedy, as messages to operators."""

from typing import NamedTuple


class Problem(NamedTuple):
    """A problem with an engine, such as a fact that it does not report, and what the operator can do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def unfit(
    given: int | None, told: int | None, whole: int | None, page_size: int | None, has_events: bool
) -> Problem | None:
    """Return a problem if the block size that the operator set does not fit the engine, else None.

    All sizes are in tokens. `given`: the operator's block size. `told`: the block size that the engine reports. With
    decode context parallelism (GPUs that share each block) vLLM before 0.32 reports only one GPU's share of a block.
    `whole`: the size of whole blocks, or None until the engine's events or metrics show it. Until then a multiple of
    `told` is accepted if the engine publishes events (`has_events`).
    `page_size`: the size of the smallest part of a block that the engine can find in its cache.
    """
    if not whole and has_events and given and told and given % told == 0:
        return None
    return block_size_set(given, whole or told, page_size)


def block_size_set(given: int | None, told: int | None, page_size: int | None = None) -> Problem | None:
    """Return a problem if the operator set another block size than the engine has, else None.

    All sizes are in tokens. `given`: the operator's block size; `told`: the engine's. `page_size`: the size of the
    smallest part of a block that the engine can find in its cache; any multiple of it is valid.
    """
    if not given or not told or given == told or (page_size and given % page_size == 0):
        return None
    if given % told == 0:
        what = f"what it holds is matched in steps of {given} and predictions leave out up to {given - told} cached tokens of a prompt"
    else:
        what = "its KV events cannot be matched with prompts and its cache is guessed from traffic"
    return Problem(f"block_size is set to {given} tokens, but its engine caches blocks of {told}, so {what}", UNSET)


class Remedies(NamedTuple):
    """What an operator can do about problems with one kind of engine, in terms of that engine's flags.

    Each field has the remedy for the problem in its comment.
    """

    models: str  # /v1/models requires an API key
    figures: str  # /metrics has none of the engine's series
    names: str  # /metrics lacks some of the series, which may have other names
    caching: str  # prefix caching is off
    repeats: str  # a prompt that was sent twice was not found in the cache
    events: str  # no KV events are published
    tiers: str  # KV events do not cover slower tiers
    unlisted: str  # the engine does not report whether and where it publishes events
    binding: str  # the publisher connects instead of binding, so the gateway cannot subscribe
    ranks: str  # one data-parallel rank publishes no KV events
    nodes: str  # a rank that may be on another node is silent
    replay: str  # KV events cannot be replayed
    cached_tokens: str  # answers do not report how much of a prompt was cached
    transfer: str  # the engine keeps no prompt's KV cache for another replica


UNSET = "leave --block-size out; it is learned from each replica"
EVENTS_OFF = "KV events are off, the cache is guessed from traffic"
TIERS_UNTOLD = (
    "it looked for {} tokens in slower tiers, and its KV events tell nothing of what is there: predictions leave it out"
)
TIERS_UNKNOWN = "it keeps KV cache in slower tiers, which nobody knows of without KV events: predictions leave it out"
NO_CACHED_TOKENS = "answers do not say how many prompt tokens were cached, so predictions cannot be checked one by one"
DRAINED = "it gets no requests until it is asked back"
NO_REPLAY = (
    "KV events cannot be replayed: the gateway starts cold, and forgets this replica's cache when an event is lost"
)
EVENTS_BY_HAND = "URL#events=tcp://HOST:PORT,replay=tcp://HOST:PORT"
