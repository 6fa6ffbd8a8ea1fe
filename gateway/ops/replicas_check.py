"""Checks of `hitherto doctor` on how replicas describe themselves, each alone and compared with the others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path

import aiohttp

from gateway.model import folder_here
from gateway.ops.trial import Finding
from gateway.settings import Settings
from replicas import pairing
from replicas.access import Access
from replicas.adopt import IS_GATEWAY, Facts, problems_of
from replicas.duplicates import Name, duplicate, duplicates
from replicas.problems import UNSET, Problem
from replicas.replica import Address, Replica
from replicas.roles import BOTH, REMEDY, SPEAK_ALIKE, lacks, unlike
from replicas.served import base_names, count_models, marks

SKEW_SECONDS = 2.0  # Date headers have whole seconds


def by_model(replicas: list[tuple[Address, Facts]]) -> list[list[tuple[Address, Facts]]]:
    """Return the replicas in groups that serve the same base model.

    Replicas that report no model join the only group if there is one, as the gateway sends them its requests too, and
    are a group of their own if there are several.
    """
    groups: list[tuple[set[str], list[tuple[Address, Facts]]]] = []
    for address, facts in sorted(replicas, key=lambda one: not base_names(one[1].models)):
        names = set(base_names(facts.models))
        alike = (one for one in groups if one[0] & names or one[0] == names or (not names and len(groups) == 1))
        group = next(alike, None)
        if group is None:
            groups.append((set(names), [(address, facts)]))
        else:
            group[0].update(names)
            group[1].append((address, facts))
    return [members for _, members in groups]


def by_files(settings: Settings, group: list[tuple[Address, Facts]]) -> list[list[tuple[Address, Facts]]]:
    """Return the replicas of one model in groups started from the same files, as far as these are on this machine."""
    if settings.model or not group:
        return [group]
    variants: dict[Path | None, list[tuple[Address, Facts]]] = {}
    for address, facts in group:
        variants.setdefault(folder_here(facts.root), []).append((address, facts))
    strangers = variants.pop(None, [])
    first, *others = variants.values() or [[]]
    return [first + strangers, *others]


def check_reached(address: Address, facts: Facts) -> Finding:
    """Report what the replica serves, or why it serves nothing."""
    if not facts.serving:
        return Finding(
            "fail",
            f"replica {address.id}",
            facts.error or "does not serve a model",
            "give the URLs of the engines behind that gateway as --replica-url, in place of its own"
            if facts.error == IS_GATEWAY
            else remedy_of_silence(facts.fault, address.port),
        )
    cache = f", {facts.num_blocks} blocks of {facts.block_size}" if facts.num_blocks else ""
    bases = base_names(facts.models)
    adapters = [name for name, parent in facts.models.items() if parent]
    more = f", adapters {', '.join(adapters)}" if adapters else ""
    length = f", context {facts.max_model_len}" if facts.max_model_len else ""
    ranks = f", {len(facts.engines)} data-parallel ranks" if len(facts.engines) > 1 else ""
    return Finding(
        "ok",
        f"replica {address.id}",
        f"serves {', '.join(bases) or 'unnamed models'}{more}{cache}{length}{ranks}, version {facts.version or 'unknown'}",
    )


def remedy_of_silence(fault: str | None, port: int) -> str:
    """Return what to do about an engine that serves nothing, by the kind of its fault."""
    if fault == "refused":
        return (
            f"another program may listen there, which `ss -ltnp 'sport = :{port}'` on its machine names; start the engine on a "
            "free port, or correct its URL"
        )
    if fault == "timeout":
        return (
            "it hangs, still loads, or is out of reach. If its port takes connections and its log does not say that it "
            "loads, save `py-spy dump --pid PID` of its process and restart it; else look at its machine and at firewalls"
        )
    return "start it, wait for it to load, or correct its URL"


def problems_by_subject(address: Address, facts: Facts) -> dict[str, Problem]:
    return problems_of(facts, address.source, facts.events(address.source))


def check_own_words(address: Address, facts: Facts, problems: Mapping[str, Problem] | None = None) -> Iterator[Finding]:
    """Yield what the engine reports of itself that hinders the gateway, events excepted, which the trial judges."""
    for name, problem in (problems_by_subject(address, facts) if problems is None else problems).items():
        if name in ("models", "metrics", "caching", "tiers", "role"):
            level = "fail" if name == "caching" else "warn"
            subject = "model names" if name == "models" else name
            yield Finding(level, f"{subject} {address.id}", problem.what, problem.remedy)


def check_models(replicas: list[tuple[Address, Facts]]) -> Finding:
    """Check that the replicas serve the same models by the same names."""
    told_by = [(address, facts) for address, facts in replicas if base_names(facts.models)] or replicas
    bases = {address.id: sorted(base_names(facts.models)) for address, facts in told_by}
    if len(set(map(tuple, bases.values()))) == 1:
        many = f"all {len(bases)} replicas that {'tell a model' if len(told_by) < len(replicas) else 'answer'} serve"
        return Finding(
            "ok",
            "models",
            f"{'the replica serves' if len(replicas) == 1 else many} "
            + (", ".join(next(iter(bases.values()))) or "unnamed models"),
        )
    told = "; ".join(f"{id}: {', '.join(names)}" for id, names in bases.items())
    if count_models(marks(facts.models, facts.root) for _, facts in replicas if facts.models) < 2:
        return Finding(
            "warn",
            "models",
            f"the replicas serve one model by different names ({told}): they share a name or the folder they were started from",
            "a request goes to the replicas that serve the name in it, and to any where it has none; "
            "if that is not meant, start them with the same --served-model-name",
        )
    refused = "" if not all(one.models for _, one in replicas) else ", and a prompt that names none is refused"
    return Finding(
        "warn",
        "models",
        f"the replicas serve different models ({told}): they share neither a name nor the folder they were started from",
        f"each model is routed among its own replicas{refused}; if that is not meant, correct --replica-url",
    )


def check_duplicates(names: Iterable[Name]) -> Iterator[Finding]:
    """Yield a finding for each engine that is given under several names, or may be, on the first of them."""
    names, known = list(names), set[str]()
    for one in names:
        if one.id not in known and (problem := duplicate(one, names)) is not None:
            yield Finding("warn", f"twice {one.id}"[:60], problem.what, problem.remedy)
            known.update(duplicates(one, names)[0])


def check_roles(replicas: list[Replica]) -> Finding | None:
    """Check whether prompts can be computed on one replica and answered by another; None if no roles are set."""
    roles = [one.role for one in replicas]
    if set(roles) == {BOTH}:
        return None
    names = _named(one.models for one in replicas)
    if what := lacks(set(roles)):
        return Finding("fail", "roles", f"of {names}: {what}", REMEDY)
    if what := unlike((one.role, None if one.transfer is None else one.transfer.name) for one in replicas):
        return Finding("fail", "roles", f"of {names}: {what}", SPEAK_ALIKE)
    counted = f"{', '.join(f'{roles.count(role)} {role}' for role in sorted(set(roles)))} of {names}"
    found, pairs, untold = [], 0, dict[str, None]()
    for way in dict.fromkeys(one.transfer for one in replicas if one.transfer is not None):
        alike = [one for one in replicas if one.transfer is way]
        computing, writing = pairing.sides_of(way, alike, lambda one: one)
        found += pairing.complaints(computing, writing, way)
        untold |= dict.fromkeys(
            name for name in way.compares if any(getattr(one.traits, name) is None for one in alike)
        )
        pairs += sum(bool(first and second) for first, second in pairing.groups(computing, writing, way))
    if found:
        left = (
            counted
            if pairs
            else f"no pair of {names} is left, so no prompt is computed on one replica and answered by another"
        )
        remedies = [one.lacking.dialect.remedies.transfer if one.lacking else pairing.REMEDY for one in found]
        said = "; ".join(one.text for one in found)
        return Finding("warn" if pairs else "fail", "roles", f"{left}: {said}", "; ".join(dict.fromkeys(remedies)))
    said = f"{counted}: prompts can be computed on one replica and answered by another"
    if untold:
        said += f", as far as they tell: not {', '.join(untold)}, which have to be alike as well; the transfer below tries that"
    return Finding("ok", "roles", said)


def _named(models: Iterable[Mapping[str, str | None]]) -> str:
    """Return the names that replicas of one model serve."""
    return ", ".join(sorted({name for served in models for name in base_names(served)})) or "the model"


def _each(told: Mapping[str, int]) -> str:
    """Return each replica's value: `gpu1:8000 16, gpu2:8000 32`."""
    return ", ".join(f"{id} {value}" for id, value in told.items())


def check_block_size(
    settings: Settings, replicas: list[tuple[Address, Facts]], in_force: Mapping[str, int] = {}
) -> Finding:
    """Check that the replicas of one model have block sizes that fit each other and the settings.

    `in_force`: the result of `block_sizes_in_force`, used where the doctor's own settings give no size.
    """
    sizes = {address.id: facts.block_size for address, facts in replicas if facts.block_size}
    names = _named(facts.models for _, facts in replicas)
    given, wrong, unmatched = settings.block_size, dict[Problem, list[str]](), False
    for address, facts in replicas:
        size = given or in_force.get(address.url)
        if problem := facts.unfit(size, address.source):
            wrong.setdefault(problem, []).append(address.id)
            unmatched |= size % facts.block_size != 0
    if wrong:
        said = "; ".join(f"{', '.join(ids)} of {names}: {problem.what}" for problem, ids in wrong.items())
        return Finding("fail" if unmatched else "warn", "block size", said, UNSET)
    if len(set(sizes.values())) > 1:
        return Finding("warn", "block size", f"differs between replicas of {names}: {_each(sizes)}. They are variants, and each prompt is prepared for both",
                       "start them all with the same --block-size; of more than two variants the rest is chosen by load alone")  # fmt: skip
    if sizes:
        where = f"every replica of {names}" if len(sizes) == len(replicas) else f"{', '.join(sizes)} of {names}"
        return Finding("ok", "block size", f"{next(iter(sizes.values()))} tokens on {where}")
    if given:
        return Finding("ok", "block size", f"{given} tokens, as set; the replicas of {names} do not tell")
    return Finding(
        "warn",
        "block size",
        f"no replica of {names} tells it, so the usual 16 is assumed",
        "give --block-size as the engines were started with",
    )


def check_hash_seeds(replicas: list[tuple[Address, Facts]]) -> Finding | None:
    """Check that engines which search slower tiers, possibly shared ones, hash a block alike; None if they do."""
    tiered = [(address.id, facts) for address, facts in replicas if facts.scrape and facts.scrape.external_queries]
    random = [id for id, facts in tiered if facts.dialect.has_random_hash_seed(facts.version)]
    if len(tiered) < 2 or not random:
        return None
    names = _named(facts.models for _, facts in replicas)
    return Finding("warn", "hash seeds", f"engines of {names} name blocks in this release by a seed that is random in each process: what "
                   f"{', '.join(random)} put into a tier that replicas share, no other finds",
                   "start all with the same PYTHONHASHSEED, or a newer release; nothing to mend if each has a tier of its own")  # fmt: skip


def check_context(replicas: list[tuple[Address, Facts]]) -> Finding:
    """Check that the replicas of one model have the same context length."""
    lengths = {address.id: facts.max_model_len for address, facts in replicas if facts.max_model_len}
    names = _named(facts.models for _, facts in replicas)
    if not lengths:
        return Finding("ok", "context", f"no replica of {names} tells its length; prompts are not checked for it")
    if len(set(lengths.values())) > 1:
        return Finding("warn", "context", f"differs between replicas of {names}: {_each(lengths)}. Longer prompts go only to those that have room",
                       "start them all with the same --max-model-len if that is not meant")  # fmt: skip
    return Finding("ok", "context", f"{next(iter(lengths.values()))} tokens on every replica of {names}")


async def _skew(way: Access) -> float | None:
    """Return by how many seconds at least the replica's clock is off; None if it does not report the time."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError):
        before = time.time()
        async with way.session.get(
            way.url + "/health", timeout=aiohttp.ClientTimeout(5), allow_redirects=False
        ) as response:
            then = parsedate_to_datetime(response.headers["Date"]).timestamp()
        return max(then - time.time(), before - then - 1, 0.0)  # the header is cut to whole seconds
    return None


async def check_clock(ways: dict[str, Access]) -> Finding:
    """Compare the replicas' Date headers with this machine's clock."""
    found = zip(ways, await asyncio.gather(*map(_skew, ways.values())), strict=True)
    skews = {id: skew for id, skew in found if skew is not None}
    wrong = {id: skew for id, skew in skews.items() if skew > SKEW_SECONDS}
    if wrong:
        told = ", ".join(f"{id} by {skew:.0f} s" for id, skew in wrong.items())
        return Finding(
            "warn",
            "clock",
            f"differs from the replicas' clocks: {told}",
            "routing does not depend on it, but logs and metrics do: run NTP on all machines",
        )
    return Finding(
        "ok",
        "clock",
        f"agrees with {len(skews)} of {len(ways)} replicas"
        if skews
        else "no replica tells the time; nothing to compare",
    )
