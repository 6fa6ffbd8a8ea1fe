"""Replicas that come and go with the pods of a Kubernetes cluster, and change with the pods' labels."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from replicas.cluster_api import Pods, PodsError
from replicas.fleet import Fleet
from replicas.pods import Discover, Place, Pod
from replicas.replica import Replica, parse_url

log = logging.getLogger("replicas")

MOST_PODS = 1024  # pods used as replicas; each is probed, and probing 100,000 would leave no time for clients
RETRY_SECONDS = 1.0  # between two attempts to reach the API


class Discovery:
    """Adds and removes a fleet's replicas as the pods of a cluster come and go.

    A replica that an operator removed is not added again until its pod is replaced. Replicas that operators gave by URL
    are not touched.
    """

    def __init__(self, fleet: Fleet, discover: Discover, where: Place):
        self._fleet, self._discover = fleet, discover
        self._pods = Pods(discover, where, self.changed)
        self._wanted: dict[str, tuple[str, str]] = {}  # by replica id: URL and uid of its pod, from `wanted`
        self._added: dict[str, tuple[str, str]] = {}  # those of them that were added to the fleet
        self._said: set[str] = set()  # messages already logged about pods that cannot be replicas
        self._left_out: frozenset[str] = frozenset()  # removed by operators under the former gateway process
        self._pods_before: frozenset[str] = frozenset()
        self.leaving: Callable[[Sequence[Replica]], None] = lambda replicas: None  # called before replicas are removed
        # Called with a replica's id once its pod is gone or changed: what operators asked for it no longer applies.
        self.gone: Callable[[str], None] = lambda id: None
        self.problem = "not asked yet"  # why the API reports nothing; "" while it does

    async def run(self) -> None:
        """Follow the pods until cancelled. While the API cannot be reached, the pods that it reported last are kept."""
        while True:
            try:
                await self._pods.follow()
            except PodsError as error:
                if str(error) != self.problem:
                    log.warning("pods: %s", error)
                self.problem = str(error)
            await asyncio.sleep(RETRY_SECONDS)

    def changed(self, pods: Sequence[Pod]) -> None:
        """Add and remove replicas so that the fleet has those of `pods`, the pods that exist now."""
        if self.problem:
            log.info("pods: the API tells of %d", len(pods))
        self.problem = ""
        self._wanted, complaints = wanted(self._discover, pods)
        for complaint in sorted(complaints - self._said):
            log.warning("%s: it gets no requests", complaint)
        self._said = complaints
        for id in sorted(self._left_out & self._wanted.keys()):
            self._added[id] = self._wanted[id]
        for id in sorted(self._pods_before - self._wanted.keys()):
            self.gone(id)
        self._left_out = self._pods_before = frozenset()
        self._reconcile()

    def to_dict(self) -> dict[str, Any]:
        return {"selector": self._discover.selector, "replicas": len(self._wanted), "problem": self.problem or None}

    def resume(self, left_out: Iterable[str], pods: Iterable[str]) -> None:
        """Take over what a former gateway process knew of its replicas; call this before any pod is known.

        `left_out`: ids of replicas that operators removed; `pods`: ids of all replicas that the process had from pods.
        """
        self._left_out, self._pods_before = frozenset(left_out), frozenset(pods)

    def handed_on(self) -> dict[str, list[str]]:
        """Return the arguments of `resume` for a gateway process that takes over from this one."""
        engines = self._fleet.engines
        pods = {*self._added, *self._pods_before, *self._left_out}
        removable = {*self._added, *self._left_out}
        left_out = [id for id in removable if id not in engines or engines[id].removal is not None]
        return {"pods": sorted(pods), "left_out": sorted(left_out)}

    def _reconcile(self, removed: asyncio.Task[None] | None = None) -> None:
        """Remove replicas whose pod is gone or changed, and add missing ones.

        A new pod may have the same replica id as a former one. Its replica is added only when the former replica is
        removed completely, since each finished removal calls this method again.
        `removed`: the finished task of the removal that makes this call; None for other calls.
        """
        if removed is not None and removed.cancelled():
            return
        for id in [id for id, pod in self._added.items() if self._wanted.get(id) != pod]:
            del self._added[id]
            self.gone(id)
            if (engine := self._fleet.engines.get(id)) is not None:
                log.info("replica %s: its pod is gone, is to end, or says something else now", id)
                if engine.removal is None:  # else an operator wants it removed permanently
                    self.leaving(engine.replicas)
                self._fleet.remove(id).add_done_callback(self._reconcile)
        for id, (url, uid) in self._wanted.items():
            if id not in self._added and id not in self._fleet.engines:
                self._fleet.add(url)
                self._added[id] = url, uid
                log.info("replica %s: added for its pod, %s", id, url)


def wanted(discover: Discover, pods: Sequence[Pod]) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Return the replicas that these pods make, and messages about pods that cannot be replicas.

    The replicas are returned by id, each with its URL and its pod's uid. Only the first MOST_PODS of `pods` are used,
    in the order given.
    """
    found: dict[str, tuple[str, str]] = {}
    complaints = set()
    if len(pods) > MOST_PODS:
        complaints.add(f"{discover.selector!r} finds more than {MOST_PODS} pods (see discover.selector); any other")
    for pod in pods[:MOST_PODS]:
        try:
            url = discover.url_of(pod.ip, pod.labels)
        except ValueError as error:
            complaints.add(f"pod {pod.name}: {error}")
        else:
            found[parse_url(url).id] = url, pod.uid
    return found, complaints
