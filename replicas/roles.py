"""Which part of a request a replica is for, where prompts are computed on other replicas than answers."""

from collections.abc import Iterable

PREFILL = "prefill"  # computes prompts; gets whole requests only if nobody else can take them
DECODE = "decode"  # writes answers to prompts that came computed, and takes whole requests
BOTH = "both"
ROLES = (PREFILL, DECODE, BOTH)
PREFILLERS, DECODERS = (PREFILL, BOTH), (DECODE, BOTH)


def lacks(roles: set[str]) -> str:
    """What is missing among the roles of the replicas that serve one model, in words; "" if nothing is."""
    if PREFILL in roles and roles.isdisjoint(DECODERS):
        return f"a replica has role={PREFILL} and none has role={DECODE} or role={BOTH}: it gets whole requests"
    if DECODE in roles and roles.isdisjoint(PREFILLERS):
        return f"a replica has role={DECODE} and none has role={PREFILL} or role={BOTH}: it computes its prompts itself"
    return ""


def unlike(pairs: Iterable[tuple[str, str | None]]) -> str:
    """Why no replica of one model can fetch what another computed, in words; "" if one can, or if nobody is to.
    `pairs`: each one's role, and the name of the way in which it passes caches on."""
    told = [*pairs]
    computing = {way for role, way in told if role in PREFILLERS}
    writing = {way for role, way in told if role in DECODERS}
    if {role for role, _ in told} <= {BOTH} or not computing or not writing or computing & writing - {None}:
        return ""
    said = [", ".join(sorted(way or "nothing" for way in side)) for side in (computing, writing)]
    return f"those that compute prompts pass caches on by {said[0]}, those that write answers by {said[1]}: no request has two legs"


SPEAK_ALIKE = "give both sides the same transfer= behind the # of their URLs, or engines of one kind"
REMEDY = f"give the URL of a counterpart, http://HOST:PORT#role={PREFILL} or #role={DECODE}, or leave role= out"
