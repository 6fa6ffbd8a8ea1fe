"""What a profile and the supervisor agree on: the model, the ports, the command line, the refusal."""

from pathlib import Path
from typing import NamedTuple


class ProfileError(ValueError):
    """A profile that is missing or wrong; the message says where and what to do."""


class Ports(NamedTuple):
    """`ranks` engines behind one HTTP port publish on `events`, `events` + 1 ...; `replay` and `side` (KV
    transfer between engines) count alike."""

    http: int
    events: int
    replay: int
    side: int = 0
    ranks: int = 1

    @staticmethod
    def width(ranks: int) -> int:
        """How many consecutive ports one replica needs."""
        return 1 + 3 * ranks

    @classmethod
    def run(cls, first: int, ranks: int) -> "Ports":
        return cls(first, first + 1, first + 1 + ranks, first + 1 + 2 * ranks, ranks)

    def all(self) -> range:
        return range(self.http, self.http + self.width(self.ranks))


class Model(NamedTuple):
    directory: Path | None  # None: the engine's own default
    served_name: str | None


class Command(NamedTuple):
    argv: list[str]
    env: dict[str, str]  # on top of the gateway's own environment
