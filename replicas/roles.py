"""The role of a replica: prefill, decode or both.

A request may have two legs: a prefill replica computes the prompt, and a decode replica writes the answer.
"""

from collections.abc import Iterable

PREFILL = "prefill"  # computes prompts; gets whole requests only if no other replica can take them
DECODE = "decode"  # decodes answers to prompts computed elsewhere, and takes whole requests
BOTH = "both"
ROLES = (PREFILL, DECODE, BOTH)
PREFILLERS, DECODERS = (PREFILL, BOTH), (DECODE, BOTH)


def lacks(roles: set[str]) -> str:
    """Return a message if a model has prefill replicas but none that decodes, or the reverse; else "".

    `roles`: the roles of all replicas of the model. A replica with the role `both` counts on either side.
    """
    if PREFILL in roles and roles.isdisjoint(DECODERS):
        return f"a replica has role={PREFILL} and none has role={DECODE} or role={BOTH}: it gets whole requests"
    if DECODE in roles and roles.isdisjoint(PREFILLERS):
        return f"a replica has role={DECODE} and none has role={PREFILL} or role={BOTH}: it computes its prompts itself"
    return ""


def unlike(pairs: Iterable[tuple[str, str | None]]) -> str:
    """Return a message if no two replicas of a model can pass a KV cache on, because their transfers differ; else "".

    `pairs`: for each replica its role, and the name of the transfer by which it passes KV caches to others (None: it
    does not). Replicas that all have the role `both` need no transfer.
    """
    told = [*pairs]
    computing = {way for role, way in told if role in PREFILLERS}
    writing = {way for role, way in told if role in DECODERS}
    if {role for role, _ in told} <= {BOTH} or not computing or not writing or computing & writing - {None}:
        return ""
    said = [", ".join(sorted(way or "nothing" for way in side)) for side in (computing, writing)]
    return f"those that compute prompts pass caches on by {said[0]}, those that write answers by {said[1]}: no request has two legs"


SPEAK_ALIKE = "give both sides the same transfer= behind the # of their URLs, or engines of one kind"
REMEDY = f"give the URL of a counterpart, http://HOST:PORT#role={PREFILL} or #role={DECODE}, or leave role= out"
