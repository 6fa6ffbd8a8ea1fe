"""Ask the cache manager of the vLLM that HITHERTO_VLLM names what it finds of prompts.

    HITHERTO_VLLM=FOLDER [PYTHONPATH=...] python -m tests.vllm.lookups

writes that into `tests/cachemap/events/lookups.gz`, beside what other versions found. PYTHONPATH: of another version's
Python, which is run in that environment.
"""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache

import msgspec

from ..cachemap.events.test_lookups import RECORDED, Answer, recorded
from .engines import by_vllm

# Blocks that a manager has: so few that most of what is stored is evicted.
KINDS = {("full", 1): 110, ("full", 2): 56, ("full", 8): 26, ("windows", 1): 300, ("mamba", 1): 160,
         ("mamba", 2): 100, ("mamba", 8): 64}  # fmt: skip


def jobs(requests: int, version: str = "") -> list[dict]:
    """From 0.33 on a speculator drops no block unless there is a KV connector; `ahead`: one token behind each names it,
    and with several modules for MTP so many."""
    speculators = [(False, 0), (True, 0), *([(True, 1), (True, 3)] if version and version >= "0.33" else [])]
    return [
        {"kind": kind, "size": 16, "dcp": dcp, "drops": drops, "ahead": ahead, "blocks": blocks, "seed": 1,
         "requests": requests, "longest": 1200 if dcp == 8 else 560}
        for (kind, dcp), blocks in KINDS.items() for drops, ahead in speculators
    ]  # fmt: skip


@cache
def number() -> str:
    """The version whose Python answers."""
    lines = by_vllm("-c", "from vllm import version; print(version.__version__)")
    return lines[-1].split()[-1].partition("+")[0]


def ask(wanted: list[dict]) -> list[list[Answer]]:
    """Of each job what was found, and published, request by request."""
    lines = iter(by_vllm("managers.py", asked="".join(json.dumps(job) + "\n" for job in wanted)))
    told = [[json.loads(next(lines)) for _ in range(job["requests"])] for job in wanted]
    return [[(found, base64.b64decode(payload)) for found, payload in answers] for answers in told]


def main() -> None:
    version, kept = number(), list(recorded().values())
    asked = [{**job, "vllm": version} for job in jobs(24, version)]
    kept = [one for one in kept if one[0]["vllm"] != version] + list(zip(asked, ask(asked), strict=True))
    kept.sort(key=lambda one: one[0]["vllm"])
    RECORDED.write_bytes(gzip.compress(msgspec.msgpack.encode(kept), 9, mtime=0))


if __name__ == "__main__":
    main()
