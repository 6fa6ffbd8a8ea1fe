"""What a profile and the supervisor agree on: the model, the ports, the command line, the refusal."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from replicas.event_source import EventSource
from replicas.pairing import Traits


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


class LaunchProfile(Protocol):
    """How an engine is started. Each dialect has a pydantic model of its own with these."""

    engine: str  # the dialect's id
    own_model: str | None  # the model that it serves when it is given none
    role: str  # of `replicas.roles`: which part of a request its engines are for
    start_timeout_s: float

    @property
    def ranks(self) -> int:
        """How many data-parallel ranks one engine has."""

    def place(self, count: int, used: Sequence[str] = ()) -> tuple[Self, list[dict[str, str]]]:
        """The profile as this machine can run it, and each replica's own environment; `used`: devices that others have
        already. Raises ProfileError."""

    @property
    def no_transfer(self) -> str:
        """Why its engines pass no prompt's cache on, and what would be right; "" if they do."""

    @property
    def transfer(self) -> str:
        """How its engines pass caches on, one of `replicas.engines.TRANSFERS`; "": as engines of its kind do."""

    def bootstrap(self, ports: Ports) -> int:
        """The port at which engines that fetch a prompt's cache find one of its engines; 0: none is needed."""

    @property
    def traits(self) -> Traits:
        """What it says of its engines that decides with which others they can exchange caches."""

    @property
    def context_parallel(self) -> int:
        """Of how many GPUs' shares each block of its cache consists."""

    @property
    def drops_block(self) -> bool | None:
        """Whether its engines compute the last block of what they find again; None: it does not say."""

    def unlike(self, decoder: Self) -> list[str]:
        """What keeps engines of `decoder` from fetching a cache from those of this one, which is of the same kind and
        passes caches on; [] if nothing does."""

    def command(self, host: str, ports: Ports, model: Model) -> Command:
        """Raises ProfileError."""

    def events(self, host: str, ports: Ports) -> EventSource | None:
        """Where the engine publishes, as far as the command line fixes it; its first rank, where it has several."""
