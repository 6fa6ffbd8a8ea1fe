"""The interface between launch profiles and the supervisor: model, ports, command line, errors."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from replicas.event_source import EventSource
from replicas.pairing import Traits


class ProfileError(ValueError):
    """A profile is missing or wrong; the message says where and what to do."""


class Ports(NamedTuple):
    """The ports of one engine with `ranks` data-parallel ranks.

    The ranks publish on `events`, `events` + 1 ...; their `replay` and `side` ports (KV transfer between engines)
    follow in the same way.
    """

    http: int
    events: int
    replay: int
    side: int = 0
    ranks: int = 1

    @staticmethod
    def width(ranks: int) -> int:
        """Return how many consecutive ports one engine needs."""
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
    env: dict[str, str]  # added to the gateway's own environment


class LaunchProfile(Protocol):
    """The fields and methods of a launch profile. Each dialect has a pydantic model of its own with these."""

    engine: str  # the dialect's id
    own_model: str | None  # the model that it serves if none is given
    role: str  # role of its engines, see `replicas.roles`
    start_timeout_s: float

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks of one engine."""

    def place(self, count: int, used: Sequence[str] = ()) -> tuple[Self, list[dict[str, str]]]:
        """Return the profile as this machine can run it, and each replica's own environment.

        `used`: devices that are taken already. Raises ProfileError.
        """

    @property
    def no_transfer(self) -> str:
        """The reason why its engines pass no prompt's cache on, with a remedy; "" if they do."""

    @property
    def transfer(self) -> str:
        """The transfer of its engines, one of `replicas.engines.TRANSFERS`; "": their dialect's default."""

    def bootstrap(self, ports: Ports) -> int:
        """Return the port at which other engines find one of its engines to fetch a prompt's cache, or 0."""

    @property
    def traits(self) -> Traits:
        """The traits of its engines that decide with which others they can exchange caches."""

    @property
    def context_parallel(self) -> int:
        """The number of GPUs that share each block of the cache."""

    @property
    def drops_block(self) -> bool | None:
        """Whether its engines recompute the last block of a cache hit; None if the profile does not say."""

    def unlike(self, decoder: Self) -> list[str]:
        """Return what keeps engines of `decoder` from fetching a cache from those of this profile; [] if nothing does.

        Both profiles are of the same kind and pass caches on.
        """

    def command(self, host: str, ports: Ports, model: Model) -> Command:
        """Return the engine's command. Raises ProfileError."""

    def events(self, host: str, ports: Ports) -> EventSource | None:
        """Return where the engine (its first rank) publishes, as far as the command line fixes it."""
