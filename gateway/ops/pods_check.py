"""Checks of `hitherto doctor` on a cluster's pods: whether the API lists them, and which of them are replicas."""

from __future__ import annotations

from collections import Counter

from gateway.ops.trial import Finding
from replicas.cluster_api import Pods, PodsError
from replicas.discovery import wanted
from replicas.pods import Discover, place
from replicas.replica import parse_url


async def find_pods(discover: Discover) -> tuple[list[str], list[Finding]]:
    """Return the URLs of the pods that are replicas, and findings."""
    try:
        pods = await Pods(discover, place(discover), lambda _: None).list()
    except PodsError as error:
        return [], [Finding("fail", "pods", str(error), "the gateway goes on with the replicas that it knows")]
    found, complaints = wanted(discover, pods)
    urls = [url for url, _ in found.values()]
    none = [
        Finding("warn", "pods", f"{one}: it gets no requests", "correct the label, or the selector")
        for one in sorted(complaints)
    ]
    if not urls:
        return [], [*none, Finding("fail", "pods", f"none that {discover.selector!r} selects is a replica",
                                   "see discover.selector and discover.namespace; a pod needs an address")]  # fmt: skip
    roles = Counter(parse_url(url).role for url in urls)
    said = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    return urls, [Finding("ok", "pods", f"{len(urls)} are replicas ({said})"), *none]
