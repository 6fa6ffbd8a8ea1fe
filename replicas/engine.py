"""One engine behind one URL, and its replicas: one replica, or one for each data-parallel rank.

Ranks share a server process, so health, restarts and the engine's reports are handled once, on a `Replica` object that
stands for the whole engine (`lead`). Each rank has its own cache, so the rest of the project sees it as a replica of
its own. `Engine.follow` copies the lead's state to the ranks.
"""

import asyncio
from dataclasses import dataclass, field
from time import monotonic

from replicas.launch.supervisor import Supervisor
from replicas.replica import EventSource, Replica, url_of
from replicas.watch import Watch


@dataclass(slots=True, eq=False)
class Engine:
    lead: Replica
    watch: Watch
    task: asyncio.Task  # runs `watch`
    supervisor: Supervisor | None = None  # of an engine that the gateway launched
    ports: range = range(0)  # all ports that it listens on, if the gateway launched it
    devices: tuple[str, ...] = ()  # all devices that it may use, if the gateway launched it
    drain: asyncio.Task | None = None
    removal: asyncio.Task | None = None
    replicas: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = [self.lead]

    @property
    def url(self) -> str:
        """The engine's URL, with all settings in its fragment, as `parse_url` reads them."""
        lead = self.lead
        return url_of(
            lead.url,
            self.watch.given,
            lead.required_model,
            lead.role,
            lead.spill,
            lead.moves_by,
            lead.bootstrap,
            lead.peer,
        )

    @property
    def ranked(self) -> bool:
        return self.replicas != [self.lead]

    def resize(self, count: int) -> None:
        """Set the number of data-parallel ranks; ranks that stay keep their `Replica` objects."""
        if count == 1:
            self.replicas = [self.lead]
        else:
            kept = self.replicas[:count] if self.ranked else []
            self.replicas = kept + [self.lead.at_rank(rank, monotonic()) for rank in range(len(kept), count)]

    def follow(self) -> None:
        """Copy the state and the facts of the whole engine to the replicas of its ranks."""
        if self.ranked:
            sources: list[EventSource | None] = self.watch.sources
            for replica in self.replicas:
                replica.follow(self.lead, sources[replica.rank])
