"""The record of a gateway's last 15 minutes: figures, sampled decisions, shared prefixes and a journal of events.

`Recent.follow` updates the record once a second. `Recent.kept` returns the record of one process. `merged` combines the
records of several workers. `told` makes the answer of `GET /recent` from a record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from replicas import Replica, State
from replicas.lifecycle import ENGINE_THERE, TAKES_TRAFFIC
from replicas.served import base_names

from ...proxy.failures.blame import OVERLOADED, REQUEST
from ...tenants.limits import WORDS
from ..gains import Gains
from ..log import event
from ..view import MOST_REFUSED
from . import figures
from .decisions import Sampler
from .figures import Figures
from .journal import BAD, FAILURES, GOOD, LEVELS, PLAIN, WARN, Journal
from .pace import Pace, status, times
from .prefixes import tree

if TYPE_CHECKING:
    from gateway.proxy.placement.placing import Placing

    from ..view import View

ARM_SECONDS, LOOK_SECONDS = 0.5, 1.0
TREE_SECONDS = 4.0  # between two computations of the tree of prefixes
WELL, BEGINNING = ("live", "ready", "joined"), ("connecting",)  # states of event streams, the gateway and Redis
MOST_SHOWN = 60  # decisions, and entries of the journal
SAME_SECONDS = 20.0  # equal entries of several workers within this time are one event: workers start as far apart
PACE_SECONDS = (60, 300)  # windows for comparing replicas: the second one if too little was written in the first
log = logging.getLogger("hitherto.replicas")


class Recent:
    """The record of one gateway process's last 15 minutes."""

    def __init__(self, view: View, placing: Placing, texts: bool = False) -> None:
        """Create an empty record. `texts`: whether the beginnings of prompts' texts are kept and shown."""
        self._view, self._placing, self.texts = view, placing, texts
        self.journal, self.sampler = Journal(), Sampler(placing, texts)
        self.figures = Figures(view.metrics, time())
        self._errors, self._heals, self._failures, self._refusals = Gains(), Gains(), Gains(), Gains()
        self._words: dict[tuple[str, str], str] = {}  # the last look's states of events, gateway and Redis
        self._pace = Pace()
        view.slow = lambda id: status(self._pace.slow.get(id), time())
        self._known: set[str] = set()
        self._tree: tuple[float, dict[str, Any]] = (float("-inf"), {})

    async def follow(self) -> None:
        """Update the record once a second, and sample decisions in between, until cancelled."""
        due = 0.0
        while True:
            begun = monotonic()
            self.sampler.arm(begun)
            if begun >= due:
                for _ in self._pieces(time()):
                    await asyncio.sleep(0)
                due = begun + LOOK_SECONDS - ARM_SECONDS / 2
            await asyncio.sleep(ARM_SECONDS)

    def look(self, now: float) -> None:
        for _ in self._pieces(now):
            pass

    def _pieces(self, now: float) -> Iterator[None]:
        """Record what has changed in the gateway since the last look; at each yield other work may run."""
        view = self._view
        loads = [view.ledger.own(id)[0] for id in view.replicas]
        waiting = sum(one.scrape.waiting or 0 for one in view.replicas.values() if one.scrape)
        queue = self._placing.queue
        queued = sum(queue.reading()["queued_requests"].values()) if queue is not None else 0
        yield from self.figures.pieces(now, sum(loads), queued, int(waiting))
        self._compare_replicas(now)
        self._compare_counters(now)
        self._compare_pace(now)
        self._compare_words(now)

    # --- what happened

    def replica_changed(self, replica: Replica, old: State, new: State) -> None:
        """Record a replica's change of state from `old` to `new`; called through `Fleet.on_change`."""
        now = time()
        self._meet(now, replica.id)
        self.journal.note(now, "state", f"{old} → {new}: {replica.reason}", replica.id, LEVELS.get(new, PLAIN))
        if new in FAILURES:
            self.journal.failed(now, replica.id, replica.reason)

    def control_changed(self, event: Mapping[str, Any]) -> None:
        """Record a step of overload control; called through `OverloadControl.on_change`."""
        self.journal.note(event["at"], "control", event["text"], level=WARN if event["taken"] else GOOD)

    def _meet(self, now: float, replica: str) -> None:
        if replica not in self._known:
            self._known.add(replica)
            self.journal.note(now, "fleet", f"joined the fleet; {self._count()}", replica)

    def _count(self) -> str:
        return f"{len(self._known)} replica{'' if len(self._known) == 1 else 's'} now"

    def _compare_replicas(self, now: float) -> None:
        for id, replica in [*self._view.replicas.items()]:
            self._meet(now, id)
            known = self.journal.failures.get(id)
            if replica.state in FAILURES and known is not None and not replica.reason.startswith(known.why_down):
                self.journal.failed(now, id, replica.reason)
        for id in self._known - set(self._view.replicas):
            self._known.discard(id)
            self.journal.note(now, "fleet", f"left the fleet; {self._count()}", id)
            self.journal.forget(id)
            self.figures.forget(id)

    def _compare_counters(self, now: float) -> None:
        metrics = self._view.metrics
        for (id, kind), by in self._errors.grown(metrics.upstream_errors.values).items():
            if kind in OVERLOADED:
                self.journal.note(now, "failure", f"it was full and refused a request: {kind}", id, WARN, int(by))
            elif kind != REQUEST:
                self.journal.note(now, "failure", f"a request failed there: {kind}", id, WARN, int(by))
                self.journal.failed(now, id, f"a request failed there: {kind}", of_request=True)
        for (id,), by in self._heals.grown(metrics.heals.values).items():
            text = "its part of the map had drifted and was read again"
            self.journal.note(now, "events", text, id, WARN, int(by))
        refused = self._refusals.grown(metrics.tenant_refusals.values)
        for (tenant, kind), by in sorted(refused.items(), key=lambda one: -one[1])[:MOST_REFUSED]:
            text = f"{tenant} is refused by its limit of {WORDS[kind]}"
            if self.journal.note(now, "limits", text, "", WARN, int(by)):
                event(log, logging.WARNING, f"tenant {text}")
        if self._view.background is not None:
            failures = self._view.background.failures
            for work in self._failures.grown({kind: one.count for kind, one in failures.items()}):
                self.journal.note(now, "gateway", f"background work failed: {work}: {failures[work].last}", level=BAD)

    def _compare_pace(self, now: float) -> None:
        before = self._pace.slow
        alike: dict[tuple[frozenset[str], str], list[str]] = {}
        for id, replica in [*self._view.replicas.items()]:
            if replica.state in TAKES_TRAFFIC:
                alike.setdefault((frozenset(base_names(replica.models)), replica.role), []).append(id)
        windows = [self.figures.written(seconds) for seconds in PACE_SECONDS]
        recovered = self._pace.look(now, alike.values(), windows)
        for id, slow in self._pace.slow.items():
            if id not in before:
                self.journal.note(now, "pace", f"takes {times(slow)} as long per token as the others", id, WARN)
                event(log, logging.WARNING, f"replica takes {times(slow)} as long per token as the others", replica=id,
                      seconds_per_token=slow.each, others=slow.others)  # fmt: skip
        for id in recovered:
            self.journal.note(now, "pace", "is as quick per token as the others again", id, GOOD)
            event(log, logging.INFO, "replica is as quick per token as the others again", replica=id)

    def _compare_words(self, now: float) -> None:
        said = self._said()
        for (kind, id), (state, text) in said.items():
            before = self._words.get((kind, id))
            if state != before:
                level = GOOD if state in WELL else PLAIN if before is None or state in BEGINNING else WARN
                self.journal.note(now, kind, text, id, level)
        self._words = {key: state for key, (state, _) in said.items()}

    def _said(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Return the present states of the KV event streams, of the gateway, and of its connection to Redis.

        Each key is (kind, id), where the id is a replica's for a KV event stream, and "" for the other two. Each value
        is the state, and the text to record when the state changes.
        """
        view = self._view
        said = {("events", id): (one.state, f"{one.state}: {one.reason}") for id, one in [*view.intakes.items()]}
        why_not = view.why_not_ready()
        if why_not is None:
            said["gateway", ""] = ("ready", "ready for requests")
        else:  # without each replica's reason, which has an entry of its own
            said["gateway", ""] = ("not ready", f"not ready: {why_not.partition(':')[0]}")
        if (ledger := view.shared_ledger) is not None and ledger.joined:
            said["redis", ""] = "joined", "counts load in Redis, with all gateways"
        elif ledger is not None:
            said["redis", ""] = "away", f"the load in Redis is away, this gateway counts alone: {ledger.reason}"
        return said

    # --- what is kept and shown

    def kept(self) -> dict[str, Any]:
        """Return the record of this process as JSON data, for `told` or `merged`."""
        return {
            "figures": self.figures.kept(),
            "decisions": [*self.sampler.decisions][: -MOST_SHOWN - 1 : -1],
            "prefixes": self._prefixes(),
            "journal": self.journal.to_list(MOST_SHOWN),
            "failures": {id: {"at": one.at, "why": one.why} for id, one in self.journal.failures.items()},
            "texts": self.texts,
        }

    def _prefixes(self) -> dict[str, Any]:
        now = monotonic()
        if now - self._tree[0] >= TREE_SECONDS:
            self._tree = now, tree(self.sampler.recent(now), self._holders)
        return self._tree[1]

    def _holders(self, space: int, hashes: Sequence[int]) -> list[str]:
        held = self._view.cachemap.match(hashes, monotonic()).held
        return holders(self._placing.eligible.backends.values(), space, held, len(hashes))


def holders(backends: Iterable[Any], space: int, held: Sequence[int], blocks: int) -> list[str]:
    """Return the ids of the replicas of a space (a model's prompt format) that have at least `blocks` blocks cached.

    `held`: by a replica's slot (its column in the cache map), how many of the prompt's first blocks it has. Replicas of
    other spaces are left out, because two models with one tokenizer have the same block hashes. Replicas whose engine
    is gone are left out too: the map keeps their blocks in case the engine was only unreachable, but nobody can use
    them now.
    """
    there = (one for one in backends if one.candidate.space == space and one.replica.state in ENGINE_THERE)
    return [one.id for one in there if held[one.slot] >= blocks]


def told(kept: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the answer of `GET /recent` from a record (`Recent.kept`). `now`: the wall clock, in seconds."""
    return {"now": now, **kept, "figures": figures.told(kept["figures"], now)}


def merged(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the records of several workers (at least one) into one record.

    The prefixes are those of the worker that has sampled most prompts. They stand for all workers, since each gets a
    random part of the clients' connections.
    """
    decisions = sorted((one for kept in several for one in kept["decisions"]), key=lambda one: -one["at"])
    failures = sorted((one for kept in several for one in kept["failures"].items()), key=lambda item: item[1]["at"])
    return {
        "figures": figures.merged([kept["figures"] for kept in several]),
        "decisions": decisions[:MOST_SHOWN],
        "prefixes": max((kept["prefixes"] for kept in several), key=lambda tree: tree["samples"]),
        "journal": _merged_journals([kept["journal"] for kept in several]),
        "failures": dict(failures),
        "texts": several[0]["texts"],
    }


def _merged_journals(several: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the journals of several workers, the newest entry first.

    Each worker records the same event at a replica. Such entries become one, with the highest of the workers' counts.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in (entry for journal in several for entry in journal):
        key = entry["kind"], entry["replica"], entry["text"], entry["since"] // SAME_SECONDS
        known = found.get(key) or found.get((*key[:3], key[3] - 1)) or found.get((*key[:3], key[3] + 1))
        if known is None:
            found[key] = dict(entry)
        else:
            known["at"], known["times"] = max(known["at"], entry["at"]), max(known["times"], entry["times"])
    return sorted(found.values(), key=lambda entry: -entry["at"])[:MOST_SHOWN]
