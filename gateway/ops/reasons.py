"""The reasons of a routing decision, as plain data and in one sentence.

`hitherto explain`, `POST /explain` and the live page all show the results of `describe` and `sentence`, and therefore
cannot contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gateway.prompt import Prompt
from policies import Candidate, Demand, Evaluation, Policy, legs
from policies.decisions import SPILLED
from policies.outputs import Outputs

LOAD_FIELDS = ("requests", "prefill_tokens", "decoding", "context_tokens", "waiting")
LEAST_REASON = 0.02  # share of the cost: a term that differs by less is not named as the reason of a choice
MANY_WAIT = 5  # requests that wait in an engine from which a sentence says so: fewer are usual between two of its steps
MOST_NAMED = 3  # replicas of equal cost that a sentence names


class Term(NamedTuple):
    """The words for one term of a replica's cost.

    `meaning`: what the term measures. `advantage`: how an explanation names the reason for choosing a replica whose
    term is smaller than another's.
    """

    meaning: str
    advantage: str


TERMS = {
    "prefill": Term("computing the part of the prompt that is not held", "it computes prompts faster"),
    "queue": Term(
        "prompts that are computed before this one, and how late the replica is", "less is ahead of it there"
    ),
    "crowd": Term("decode steps that its prefill shares with answers there", "fewer answers are under way there"),
    "fetch": Term("fetching blocks from slower tiers", "less of its prompt has to be fetched from slower tiers"),
    "room": Term("waiting for blocks to become free", "there is more room in its KV cache"),
    "interference": Term("first tokens of others that this prefill delays", "fewer prompts wait there"),
    "stall": Term("pauses that this prefill makes in answers there", "fewer answers are under way there"),
    "decode": Term("this answer's decode steps among those there, weighted", "its answer is written faster there"),
    "crowding": Term("what this answer slows the others there by, weighted", "fewer answers are under way there"),
    "eviction": Term("what it pushes out of the cache and is asked for again", "its KV cache is less full"),
}


def describe(policy: Policy, prompt: Prompt, evaluation: Evaluation, outputs: Outputs) -> dict[str, Any]:
    """Return one routing decision as plain data.

    `evaluation`: the candidates and the policy's choice. `outputs`: the estimate of answers' lengths. The result has:

    `output_tokens`: the expected length of the answer.
    `output_basis`: the answers from which that length was learned, and the mean before `max_tokens` bounded it.
    `replicas`: an entry for each candidate, with the fields below.
    `ttft_seconds`, `answer_seconds`: the predicted times until the first and until the last token of the answer.
    `terms`, `seconds`: the terms of the replica's cost, and their sum; {} and None if the policy computes no costs.
    `tied`: whether the replica costs at most `tolerance_seconds` more than the cheapest, so that the policy treats both
    as equal.
    """
    demand, candidates, choice, *_ = evaluation
    terms = choice.terms or [{}] * len(candidates)
    totals = [sum(parts.values()) for parts in choice.terms] if choice.terms else []
    limit = _limit(policy, totals)
    tied = {index for index, total in enumerate(totals) if total <= limit}
    return {
        "path": prompt.path,
        "model": prompt.model,
        "adapter": prompt.adapter,
        "mode": prompt.mode,
        "note": prompt.note,
        "rendered_chars": prompt.rendered_chars,
        "tokens": prompt.tokens,
        "block_size": demand.block_size,
        "blocks": len(prompt.hashes),
        "output_tokens": demand.output,
        "output_basis": outputs.basis(demand)._asdict(),
        "policy": policy.name,
        "choice": candidates[choice.index].replica,
        "reason": choice.reason,
        "tolerance_seconds": limit - min(totals) if totals else None,
        "replicas": [
            {
                "id": candidate.replica,
                "overlap_tokens": candidate.overlap,
                "uncached_tokens": demand.tokens - candidate.cached,
                "lower_tiers": [{"tier": tier, "tokens": tokens} for tier, tokens in candidate.lower],
                "pulls_from": candidate.pull.source if candidate.pull is not None else None,
                "load": {name: getattr(candidate.load, name) for name in LOAD_FIELDS},
                **_predicted(demand, candidate),
                "was_slower": candidate.costs.is_fading,
                "terms": dict(parts),
                "seconds": sum(parts.values()) if parts else None,
                "tied": index in tied,
                "chosen": index == choice.index,
            }
            for index, (candidate, parts) in enumerate(zip(candidates, terms, strict=True))
        ],
    }


def explained(told: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a decision (`describe`) with the sentence that explains it as the first field."""
    return {"sentence": sentence(told), **told}


def _limit(policy: Policy, totals: Sequence[float]) -> float:
    """Return the cost in seconds up to which the policy treats replicas as equal to the cheapest.

    `totals`: the costs of all replicas in seconds; empty for a policy that computes no costs.
    """
    if not totals:
        return 0.0
    times, plus = policy.cost.slack  # type: ignore[attr-defined]  # whoever weighs seconds has one
    return max(min(totals), min(totals) * times + plus)


def _predicted(demand: Demand, candidate: Candidate) -> dict[str, float]:
    """Return the predicted times until the first and the last token, in seconds.

    They assume that the replica is as fast as it was at its last answers. The policy's own costs (`terms`) may be lower
    for a replica that was slow, since it forgets the slowness while the replica is not used.
    """
    costs, cached = candidate.costs.as_delivered(), candidate.cached
    fetch = candidate.fetch_seconds
    uncached, load, now = demand.tokens - cached, candidate.load, demand.now
    return {
        "ttft_seconds": fetch + costs.ttft_seconds(load, uncached, cached, now),
        "answer_seconds": fetch + costs.answer_seconds(load, uncached, cached, demand.output, now),
    }


def legs_told(chosen: legs.LegChoice | None) -> dict[str, Any] | None:
    """Return the data of a request that is split into two legs: prefill on one replica, decode on another.

    Returns None without a choice of legs: one replica then computes the whole request. `held_tokens`: prompt tokens in
    the prefill replica's cache. `moved_tokens`: prompt tokens whose KV cache is transferred.
    """
    if chosen is None:
        return None
    return {
        "prefill": chosen.prefiller.replica,
        "decode": chosen.decoder.replica,
        "held_tokens": chosen.prefiller.cached,
        "moved_tokens": chosen.moved,
        "seconds": chosen.seconds,
        "whole_seconds": chosen.whole_seconds,
    }


# --- in words


def sentence(told: Mapping[str, Any]) -> str:
    """Return in words where the request goes, why, and what it would have cost elsewhere.

    `told`: the data of the decision from `describe`, to which the caller may have added:

    `legs`: where prefill and decode run, if the request goes to two replicas (`legs_told`).
    `other_legs`: if it goes to one replica, the cheapest pair of replicas that it could have gone to.
    `narrowed`: admission's decision, if admission excluded replicas that could take the request.
    """
    chosen = next(one for one in told["replicas"] if one["chosen"])
    said = _in_legs(told["legs"], told["choice"]) if told.get("legs") else _whole(told, chosen)
    if (other := told.get("other_legs")) and not told.get("legs"):
        said += (
            f" Apart, with the prompt on {other['prefill']} and the answer on {other['decode']}, it would cost "
            f"{span(other['seconds'])} with {other['moved_tokens']:,} tokens moved."
        )
    if (waiting := chosen["load"]["waiting"]) >= MANY_WAIT:
        said += (
            f" By its own metrics {waiting:g} requests wait in the engine of {chosen['id']}, so its answer may begin "
            "later than these times say."
        )
    if chosen["was_slower"]:
        said += (
            f" {chosen['id']} was slower than the others when it last answered, and these times are what it took then."
        )
    return said


def _whole(told: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    id, price = chosen["id"], _price(told, chosen)
    rest = [one for one in told["replicas"] if not one["chosen"]]
    if not rest:
        return f"{id}, the only replica{_allowed(told) or ' that can take it'}: {price}."
    if chosen["seconds"] is None:
        return _by_rule(told, chosen, min(rest, key=lambda one: one["answer_seconds"]))
    tied = [one for one in told["replicas"] if one["tied"]]
    others = [one for one in rest if not (chosen["tied"] and one["tied"])]
    equal = f"cost the same{_within(told)}"
    if not others:
        return f"{id}, drawn from all {len(tied)}{_allowed(told)}, which {equal}: {price}."
    other = min(others, key=lambda one: one["seconds"])
    if not chosen["tied"]:
        return f"{id}, {_not_the_least(told, other)}; {price}, and {_against(chosen, other)} on {other['id']}."
    drawn = f"drawn from {len(tied)} that {equal} ({_named(tied)})"
    why = drawn if len(tied) > 1 else f"because {_why(told, chosen, other)}"
    return f"{id}, {why}: {price}, and {_against(chosen, other)} on {other['id']}, the next best."


def _allowed(told: Mapping[str, Any]) -> str:
    """Return a clause that says that admission excluded some replicas that could take the request, or "".

    `told`: the data of the decision (`describe`), with admission's decision as `narrowed`.
    """
    narrowed = told.get("narrowed", "")
    pool = " of the slow pool" if narrowed == SPILLED else ""
    return f"{pool} that admission allows to take it" if narrowed else ""


def _in_legs(apart: Mapping[str, Any], whole: str) -> str:
    said = f"{apart['prefill']} computes the prompt and {apart['decode']} writes the answer"
    if apart["seconds"] is None:
        return f"{said}: the policy chose both, {apart['moved_tokens']:,} tokens are moved."
    return (
        f"{said}: the request costs {span(apart['seconds'])} with {apart['moved_tokens']:,} tokens moved, "
        f"and {span(apart['whole_seconds'])} on {whole} alone."
    )


def _by_rule(told: Mapping[str, Any], chosen: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the explanation of a choice by a policy that computes no costs in seconds.

    `told`: the data of the decision (`describe`). `chosen`: the entry of the chosen replica. `other`: of the other
    replicas, the entry of the one with the fastest predicted answer.
    """
    return (
        f"{chosen['id']}, by {told['policy']} ({told['reason'] or 'no reason given'}): its answer is predicted to "
        f"take {span(chosen['answer_seconds'])} there, and {span(other['answer_seconds'])} on {other['id']}, "
        "the quickest of the others."
    )


def _not_the_least(told: Mapping[str, Any], least: Mapping[str, Any]) -> str:
    """Return why another replica than the cheapest was chosen.

    Either the load ledger that gateways share decided, or the policy makes another copy of a popular prefix. `told`:
    the data of the decision (`describe`). `least`: the entry of the cheapest replica.
    """
    if told.get("shared"):
        return "by the load of all gateways, which this one sees later"
    return f"to make a copy of the prefix that {least['id']} holds: enough requests have waited for want of one"


def _price(told: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    last = span(chosen["answer_seconds"])
    if told["output_tokens"]:
        comes = f"first token after {span(chosen['ttft_seconds'])}, the last after about {last}"
    else:
        comes = f"answer after {last}"
    return comes if chosen["seconds"] is None else f"the request costs {span(chosen['seconds'])} there ({comes})"


def _within(told: Mapping[str, Any]) -> str:
    """Return a clause with the greatest cost difference, in seconds, at which the policy treats replicas as equal.

    `told`: the data of the decision (`describe`).
    """
    return f" to within {span(tolerance)}" if (tolerance := told.get("tolerance_seconds")) else ""


def _against(chosen: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the cost of the other replica as text.

    If it rounds to the same text as the chosen replica's cost, the difference between the two is returned instead.
    """
    if span(other["seconds"]) != span(chosen["seconds"]):
        return span(other["seconds"])
    apart = other["seconds"] - chosen["seconds"]
    return f"{span(abs(apart))} {'more' if apart > 0 else 'less'}" if span(abs(apart)) != span(0.0) else "as much"


def _why(told: Mapping[str, Any], chosen: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return in words the greatest advantage of the chosen replica over the other one, by the terms of their costs."""
    gains = {term: other["terms"].get(term, 0.0) - seconds for term, seconds in chosen["terms"].items()}
    name = max(gains, key=gains.__getitem__)
    if gains[name] < LEAST_REASON * chosen["seconds"]:
        return "its cost is a little less"
    held = told["tokens"] - chosen["uncached_tokens"]
    if name in ("prefill", "stall", "interference", "eviction") and held > told["tokens"] - other["uncached_tokens"]:
        return f"it holds {held:,} of the {told['tokens']:,} prompt tokens"
    return TERMS[name].advantage if name in TERMS else f"its {name} is less"


def _named(ties: Sequence[Mapping[str, Any]]) -> str:
    ids = [one["id"] for one in ties]
    if len(ids) <= MOST_NAMED:
        return ", ".join(ids)
    return f"{', '.join(ids[:MOST_NAMED])} and {len(ids) - MOST_NAMED} more"


def span(seconds: float) -> str:
    """Return a time as text with its unit: milliseconds below a second, with at most three digits, else seconds."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.{1 if seconds < 0.00995 else 0}f} ms"
    return f"{seconds:,.{2 if seconds < 9.995 else 0}f} s"
