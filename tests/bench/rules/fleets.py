"""Small fleets and prompts for the field's rules; the tests say what each replica holds and has to do."""

from itertools import count

from xxhash import xxh3_64_intdigest

from bench.rules import make
from policies import Candidate, Choice, CostGroup, Demand, Load

_fresh = count(1)


def fleet(size, overlap=None, **loads):
    """`size` candidates; loads={"requests": [..]} sets that field of each."""
    group = CostGroup()
    return [
        Candidate(
            f"r{i}",
            overlap[i] if overlap else 0,
            Load(**{name: values[i] for name, values in loads.items()}),
            group.add(f"r{i}"),
        )
        for i in range(size)
    ]


def chain(blocks, after=()):
    """Hashes of a prompt's full blocks: those of `after` and as many more, seen nowhere before, as make `blocks`."""
    return list(after) + [xxh3_64_intdigest(b"%d" % next(_fresh)) for _ in range(blocks - len(after))]


def asked(hashes=(), tokens=None, **rest):
    hashes = list(hashes)
    return Demand(
        tokens or 16 * len(hashes) or 10, root=hashes[0] if hashes else 0, hashes=hashes, **{"now": 0.0, **rest}
    )


def send(policy, request, candidates, index):
    """The request went there, and the load is counted as a ledger does."""
    if hasattr(policy, "placed"):
        policy.placed(request, candidates, Choice(index))
    load = candidates[index].load
    load.requests += 1
    load.prefilling += 1
    load.prefill_tokens += request.tokens - candidates[index].overlap


def picks(name, request, candidates, seeds=30):
    """Every index that some seed gives: more than one shows that ties are broken at random."""
    return {make(name, seed).choose(request, candidates).index for seed in range(seeds)}
