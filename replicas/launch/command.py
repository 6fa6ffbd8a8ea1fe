"""The types that launch profiles and the supervisor share: model, ports, command line, errors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from replicas.event_source import EventSource
from replicas.pairing import Traits


class ProfileError(ValueError):
    """An error: a launch profile is missing or wrong; the message says where and what to do."""


class Ports(NamedTuple):
    """The ports of one engine; data-parallel rank r uses the first rank's port + r."""

    http: int
    events: int  # where the first rank publishes KV events
    replay: int  # where the first rank repeats past KV events
    side: int = 0  # where other engines fetch KV cache from the first rank
    ranks: int = 1  # number of data-parallel ranks

    @staticmethod
    def width(ranks: int) -> int:
        """Return how many consecutive ports an engine with `ranks` data-parallel ranks needs."""
        return 1 + 3 * ranks

    @classmethod
    def run(cls, first: int, ranks: int) -> "Ports":
        """Return the ports of an engine, out of the `width(ranks)` consecutive ports that begin with `first`.

        `ranks`: the engine's number of data-parallel ranks.
        """
        return cls(first, first + 1, first + 1 + ranks, first + 1 + 2 * ranks, ranks)

    def all(self) -> range:
        return range(self.http, self.http + self.width(self.ranks))


class Model(NamedTuple):
    directory: Path | None  # None: the engine's own default
    served_name: str | None


class Command(NamedTuple):
    argv: list[str]
    env: dict[str, str]  # added to the gateway's own environment


class LaunchProfile(ABC):
    """A launch profile, which says how engines of one kind are started.

    Each kind has a pydantic model with its own fields, which inherits from this class.
    """

    if TYPE_CHECKING:  # fields of the models
        engine: Any  # the id of its kind of engine
        role: Any  # of its engines: prefill, decode or both
        start_timeout_s: float

    own_model: ClassVar[str | None] = None  # the model that it serves if none is given

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks of each engine that is started with this profile."""
        return 1

    @property
    def traits(self) -> Traits:
        """The settings in this profile that decide with which other engines its engines can exchange KV caches."""
        return Traits()

    @property
    def context_parallel(self) -> int:
        """The number of GPUs that share each block of the KV cache."""
        return 1

    @property
    def drops_block(self) -> bool | None:
        """Whether engines with this profile recompute the last block of a cache hit; None if it does not say."""
        return None

    @property
    @abstractmethod
    def publishes(self) -> bool:
        """Whether engines with this profile publish KV events."""

    @property
    @abstractmethod
    def no_transfer(self) -> str:
        """Why engines with this profile cannot pass a prompt's KV cache on, with a remedy; "" if they can."""

    @property
    @abstractmethod
    def transfer(self) -> str:
        """How engines with this profile pass KV caches to other engines.

        It is a key of `TRANSFERS`, or "" for the default of their kind of engine.
        """

    @abstractmethod
    def bootstrap(self, ports: Ports) -> int:
        """Return which of an engine's `ports` other engines use to ask it for KV caches; 0: no such port is needed."""

    @abstractmethod
    def place(self, count: int, used: Sequence[str] = ()) -> tuple[Self, list[dict[str, str]]]:
        """Assign devices of this machine to `count` engines.

        Returns the profile, adapted to this machine (for example to one without GPUs), and the environment variables of
        each engine. `used`: devices that are taken already. Raises ProfileError.
        """

    @abstractmethod
    def command(self, host: str, ports: Ports, model: Model) -> Command:
        """Return the engine's command line and environment. Raises ProfileError."""

    def events(self, host: str, ports: Ports) -> EventSource | None:
        """Return where the engine's first rank publishes KV events; None if it publishes none."""
        if not self.publishes:
            return None
        return EventSource(f"tcp://{host}:{ports.events}", f"tcp://{host}:{ports.replay}", "")
