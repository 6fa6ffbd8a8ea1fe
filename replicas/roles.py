"""The role of a replica: prefill, decode or both, where prompts are computed on other replicas than answers."""

from collections.abc import Iterable

PREFILL = "prefill"  # computes prompts; gets whole requests only if no other replica can take them
DECODE = "decode"  # decodes answers to prompts computed elsewhere, and takes whole requests
BOTH = "both"
ROLES = (PREFILL, DECODE, BOTH)
PREFILLERS, DECODERS = (PREFILL, BOTH), (DECODE, BOTH)


def lacks(roles: set[str]) -> str:
    """Return the role that is missing among the replicas of one model, as a message; "" if none is."""
    if PREFILL in roles and roles.isdisjoint(DECODERS):
        return f"a replica has role={PREFILL} and none has role={DECODE} or role={BOTH}: it gets whole requests"
    if DECODE in roles and roles.isdisjoint(PREFILLERS):
        return f"a replica has role={DECODE} and none has role={PREFILL} or role={BOTH}: it computes its prompts itself"
    return ""


def unlike(pairs: Iterable[tuple[str, str | None]]) -> str:
    """Return why no replica of one model can fetch what another computed; "" if one can, or if none should.

    `pairs`: the role of each replica, and the name of its transfer.
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
