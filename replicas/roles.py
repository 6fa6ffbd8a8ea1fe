"""Which part of a request a replica is for, where prompts are computed on other replicas than answers."""

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


REMEDY = f"give the URL of a counterpart, http://HOST:PORT#role={PREFILL} or #role={DECODE}, or leave role= out"
