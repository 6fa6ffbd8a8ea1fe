"""The tree of the prefixes that most sampled prompts share, with the replicas that have each prefix in cache now."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

from .decisions import Sample

MOST_NODES = 16
LEAST_SAMPLES = 2  # samples that share a prefix, for it to be shown
MOST_HOLDERS = 64  # replicas named per prefix
TEXT_CHARS = 160

Holders = Callable[[int, Sequence[int]], list[str]]


class Group(NamedTuple):
    """A group of sampled prompts that share their first `end` blocks; it becomes a node of the tree.

    `path`: the ids of the nodes above it. `text_from`: how many characters of the prompts' text the nodes above it
    show.
    """

    samples: list[Sample]
    end: int
    path: tuple[str, ...]
    text_from: int


def tree(samples: Iterable[Sample], holders: Holders) -> dict[str, Any]:
    """Return the tree of shared prefixes: its nodes, the most shared prefix first, parents before their children.

    `holders`: returns the ids of the replicas of a space (a model's prompt format) that have all given blocks in cache.
    A node's `path` has the ids of the nodes above it. Its `tokens` count from the start of the prompt, and its `share`
    is the share of all samples that have the prefix.
    """
    samples = list(samples)
    nodes, order = [], count()
    heap: list[tuple[int, int, Group]] = []

    def grow(found: list[Sample], start: int, path: tuple[str, ...], text_from: int) -> None:
        for group in _apart(found, start):
            if len(group) >= LEAST_SAMPLES:
                end = _common([one.hashes for one in group])
                heapq.heappush(heap, (-len(group), next(order), Group(group, end, path, text_from)))

    by_space: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        by_space.setdefault((sample.space, sample.block_size), []).append(sample)
    for found in by_space.values():
        grow(found, 0, (), 0)
    while heap and len(nodes) < MOST_NODES:
        _, _, group = heapq.heappop(heap)
        node, text_to = _node(group, len(samples), holders)
        nodes.append(node)
        longer = [one for one in group.samples if len(one.hashes) > group.end]
        grow(longer, group.end, (*group.path, node["id"]), text_to)
    return {"samples": len(samples), "nodes": nodes}


def _node(group: Group, whole: int, holders: Holders) -> tuple[dict[str, Any], int]:
    first = group.samples[0]
    blocks = first.hashes[: group.end]
    held = holders(first.space, blocks)
    text_to = _common([one.text for one in group.samples])
    return (
        {
            "id": f"{first.model}:{blocks[-1]:016x}",  # two models with one tokenizer have the same hashes
            "path": list(group.path),
            "model": first.model,
            "tokens": group.end * first.block_size,
            "samples": len(group.samples),
            "share": len(group.samples) / whole,
            "holders": held[:MOST_HOLDERS],
            "more_holders": max(0, len(held) - MOST_HOLDERS),
            "text": first.text[group.text_from : text_to][:TEXT_CHARS],
        },
        text_to,
    )


def _apart(samples: Iterable[Sample], at: int) -> list[list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        if len(sample.hashes) > at:
            groups.setdefault(sample.hashes[at], []).append(sample)
    return list(groups.values())


def _common(several: Sequence[Any]) -> int:
    """Return the length of the longest beginning that all of these sequences share.

    The least and the greatest of them share no more than all do, so only these two are compared.
    """
    low, high = min(several), max(several)
    return next((at for at, (one, other) in enumerate(zip(low, high)) if one != other), len(low))
