"""One engine behind one URL, and its replicas: itself, or one for each data-parallel rank.

Ranks share a process, so health, restarts and the engine's reports are handled once, on the `lead`. Each rank has its
own cache, so the rest of the project sees it as a replica of its own. `follow` copies the lead's state to the ranks.
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
    ports: range = range(0)  # all ports that it listens on, if we chose them
    devices: tuple[str, ...] = ()  # all devices that it may use, if we chose them
    drain: asyncio.Task | None = None
    removal: asyncio.Task | None = None
    replicas: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = [self.lead]

    @property
    def url(self) -> str:
        """The URL with all settings that `parse_url` reads."""
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
        """Set the number of ranks. Ranks that stay keep their replicas."""
        if count == 1:
            self.replicas = [self.lead]
        else:
            kept = self.replicas[:count] if self.ranked else []
            self.replicas = kept + [self.lead.at_rank(rank, monotonic()) for rank in range(len(kept), count)]

    def follow(self) -> None:
        """Copy what is known of the engine to its ranks."""
        if self.ranked:
            sources: list[EventSource | None] = self.watch.sources
            for replica in self.replicas:
                replica.follow(self.lead, sources[replica.rank])
