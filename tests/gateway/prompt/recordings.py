"""What a real vLLM made of request bodies, as it was recorded, and what became of them in the gateway."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_hexdigest

Bodies = Mapping[str, tuple[str, dict[str, Any]]]  # by name, an API's path and a body


class Recording(NamedTuple):
    """What one engine made of a family's bodies."""

    family: str
    version: str
    answers: dict[str, str | None]  # by the body's name, a digest of the engine's ids or blocks; None where it refuses


@dataclass
class Compared:
    """What became of one family's bodies, by name."""

    equal: list[str] = field(default_factory=list)
    declined: dict[str, str] = field(default_factory=dict)  # with the reason
    wrong: dict[str, str] = field(default_factory=dict)  # with the difference
    refused: Counter[str] = field(default_factory=Counter)  # modes of the prompts that the engine refuses

    @property
    def requests(self) -> int:
        return len(self.equal) + len(self.declined) + len(self.wrong)

    @property
    def reasons(self) -> dict[str, int]:
        """Why bodies were declined, and how many."""
        return dict(Counter(self.declined.values()).most_common())


def digest_of_body(path: str, body: dict[str, Any]) -> str:
    return xxh3_64_hexdigest(json.dumps([path, body], sort_keys=True).encode())


def read(path: Path, bodies: Callable[[str], Bodies], program: str) -> list[Recording]:
    """Return all that `program` recorded in this file. Raises ValueError where bodies have changed since."""
    found = []
    for told in map(json.loads, path.read_text().splitlines()):
        asked = {name: digest_of_body(*case) for name, case in bodies(told["family"]).items()}
        if {name: body for name, (body, _) in told["answers"].items()} != asked:
            raise ValueError(f"{told['family']}: the bodies have changed: run python -m {program}")
        answers = {name: theirs for name, (_, theirs) in told["answers"].items()}
        found.append(Recording(told["family"], told["vllm"], answers))
    return found
