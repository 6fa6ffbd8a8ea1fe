"""One engine behind one URL, and the replicas it counts as: itself, or one for each data-parallel rank.

Ranks share a process, so health, restarts and what the engine tells are looked after once, on the `lead`; each rank
has its own cache, so it is a replica of its own to everybody else. `follow` hands on what the lead knows.
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
    task: asyncio.Task  # the watch's
    supervisor: Supervisor | None = None
    ports: range = range(0)  # all that it listens on, where we chose them
    devices: tuple[str, ...] = ()  # all that it may use, where we chose them
    drain: asyncio.Task | None = None
    removal: asyncio.Task | None = None
    replicas: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = [self.lead]

    @property
    def url(self) -> str:
        """The URL from which `parse_url` reads all that is given of it."""
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
        """Count as so many replicas from now on. Ranks that stay are the same replicas as before."""
        if count == 1:
            self.replicas = [self.lead]
        else:
            kept = self.replicas[:count] if self.ranked else []
            self.replicas = kept + [self.lead.at_rank(rank, monotonic()) for rank in range(len(kept), count)]

    def follow(self) -> None:
        """Hand on to the ranks what is known of the engine."""
        if self.ranked:
            sources: list[EventSource | None] = self.watch.sources
            for replica in self.replicas:
                replica.follow(self.lead, sources[replica.rank])
