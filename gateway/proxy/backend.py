"""A replica as the proxy sees it: its load and costs, its part of the map of cached blocks, its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from cachemap.events.records import UNTOLD, Blocks
from replicas.lifecycle import ENGINE_THERE, State

from ..http.messages import HOP_BY_HOP
from ..http.upstream import Pool, Sink, UpstreamError
from .blame import MOST_AGREED
from .exactness.drift import Drift
from .exactness.token_ids import Forwarding
from .retries import CONNECT, OWN, REPLACED

if TYPE_CHECKING:
    from cachemap import EventIntake
    from cachemap.background import Background
    from policies import Candidate
    from replicas import Replica
    from replicas.event_source import EventSource
    from replicas.pairing import Traits

# Costs are learned from one answer per LEARN_SECONDS on average, and LEARN_AT_ONCE in a burst. An observation takes 15
# to 20 us, and at a hundred a second a coefficient follows any change. Bursts are learned completely: the first answer
# of a batch alone, or the last alone, would show an emptier replica than there is.
LEARN_SECONDS, LEARN_AT_ONCE = 0.01, 100
# Headers that the gateway writes itself: bodies are collected and sent with their length.
NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"transfer-encoding", b"expect", b"x-request-id"}
MOST_ADAPTERS = 4096  # adapters of one replica, present and past, whose folders are remembered


Prove = Callable[[str], Awaitable[bool]]


async def taken_at_its_word(replica: str) -> bool:
    """Accept any process at the address; used where no watcher runs."""
    return True


class Backend:
    """The state of one replica in this gateway."""

    def __init__(
        self,
        replica: Replica,
        candidate: Candidate,
        prove: Prove = taken_at_its_word,
        hidden: frozenset[bytes] = frozenset(),
    ):
        """Create the state.

        `candidate`: the replica as the router sees it.
        `prove(id)`: has the replica's watcher check now which process listens; returns whether an engine answered.
        `hidden`: names of client headers that are not forwarded to this replica.
        """
        self.replica, self.candidate, self.prove, self.hidden = replica, candidate, prove, hidden
        self.id, self.slot = replica.id, candidate.slot
        self.pool = self._new_pool()
        self.drift = Drift()
        self.forwarding = Forwarding()
        self.keeps_nothing: set[str] = set()  # paths at which it answered a first leg and kept no cache
        self.learn_at = 0.0  # no observation is due before this time, in monotonic seconds
        self.source: EventSource | None = None  # the source of `intake`
        self.intake: EventIntake | None = None
        self.listening: asyncio.Task[None] | None = None  # runs `intake`, or its predecessor until that has ended
        self.adapter_roots: dict[str, str] = {}  # adapter -> the folder that it was last reported loaded from
        # the format of its blocks for `intake`: tokens per block, and how many tokens after it are part of its hash
        self.event_format: tuple[int, int] | None = None
        self.gone = False  # removed; requests that still run on it are not counted
        self._begin(None)

    def _begin(self, incarnation: str | None) -> None:
        """Begin with nothing learned about the replica's process."""
        self.incarnation = incarnation
        self.host_line, self.not_forwarded = self._head_parts()
        self.failures = 0  # requests in a row that it failed; an answer resets it
        self.answers = 0  # answered requests not yet reported to the health checks
        self.pace = 0.0  # mean seconds per token of non-streamed answers, prompt included; 0 before the first
        # Monotonic seconds until which it is chosen only if all others are full, since it refused a request as full.
        self.full_until = 0.0
        self.stored_as: Blocks = UNTOLD  # the kind of blocks that it stores, as last reported or seen in events
        self.said_to_drop: bool | None = None  # whether it last reported to recompute the last block that it finds

    def _new_pool(self) -> Pool:
        replica = self.replica
        return Pool(replica.address or replica.host, replica.port, replica.tls, replica.host)

    def connect(self, sink: Sink) -> None:
        """Open a connection, which is accepted only if it leads to the replica's present process."""
        self.pool.connect(sink, partial(self._check, self.replica.incarnation))

    async def _check(self, incarnation: str) -> UpstreamError | None:
        """Return why a new connection must not be used, or None.

        The watcher's last check of which process listens at the address is valid as long as the watcher's connection to
        that process is open. Once that has closed, the watcher first checks models, version and process again. The
        process that then answers was there while the new connection was open, so that check is valid even if the engine
        has closed the new connection meanwhile.
        """
        replica = self.replica
        answered = replica.is_proven or await self.prove(self.id)
        if replica.incarnation != incarnation or replica.state not in ENGINE_THERE:
            return UpstreamError(REPLACED, "is not the engine any more that was chosen")
        if replica.state is State.LEAVING:
            return UpstreamError(REPLACED, "is leaving, and takes nothing new")
        if answered:
            return None
        if replica.state is State.DRAINING:  # its watcher has stopped
            return UpstreamError(REPLACED, "is drained, and was not looked at before that")
        if replica.fault == OWN:
            return UpstreamError(OWN, replica.reason)
        return UpstreamError(CONNECT, "took a connection, and did not prove to be the engine that it was")

    def _head_parts(self) -> tuple[bytes, frozenset[bytes]]:
        """Return the header lines of every request to this replica, and names of client headers not to forward."""
        ours, transfer = {**self.replica.headers, **self.replica.credentials}, self.replica.transfer
        chosen = {name.lower().encode(): value.encode() for name, value in ours.items()}
        lines = b"".join(b"%b: %b\r\n" % header for header in chosen.items())
        return b"host: %b\r\n%b" % (self.replica.url.partition("://")[2].encode(), lines), NOT_FORWARDED.union(
            chosen, self.hidden, () if transfer is None or not transfer.header else (transfer.header,)
        )

    def follow_incarnation(self) -> None:
        """Reset what was learned, since the replica is another process now, perhaps at another address."""
        self._begin(self.replica.incarnation)
        self.adapter_roots = dict(self.replica.adapter_roots)
        self.drift.reset()
        self.keeps_nothing.clear()
        if self.pool.host != self.replica.address:
            self.pool.retire()
            self.pool = self._new_pool()

    def adapters_moved(self) -> list[str]:
        """Return the adapters that are loaded from another folder than when last reported, even if absent meanwhile."""
        told = self.replica.adapter_roots
        moved = [name for name, root in told.items() if self.adapter_roots.get(name, root) != root]
        self.adapter_roots |= told
        while len(self.adapter_roots) > MOST_ADAPTERS:
            del self.adapter_roots[next(iter(self.adapter_roots))]
        return moved

    @property
    def traits(self) -> Traits:
        """The properties that decide with which other replicas this one can exchange KV caches."""
        return self.replica.traits

    @property
    def is_witness(self) -> bool:
        """Whether its error answers are evidence against requests; not after too many failures in a row."""
        return self.failures < MOST_AGREED

    @property
    def is_finer(self) -> bool:
        """Whether the engine's cache hits may end within the blocks in which prompts are hashed."""
        page, (size, _) = self.replica.page_size, self.event_format or (0, 0)
        parts = self.stored_as.parts if self.replica.finds_parts else 0
        return 0 < parts < size or (page is not None and page < size)

    def serves(self, model: str | None) -> bool:
        return self.replica.serves(model)

    def may_learn(self, now: float) -> bool:
        """Return whether to learn costs from an answer now, and count the answer if so."""
        if self.learn_at > now:
            return False
        self.learn_at = max(self.learn_at, now - LEARN_SECONDS * LEARN_AT_ONCE) + LEARN_SECONDS
        return True

    def listen(self, intake: EventIntake | None, begin: Callable[[], None], background: Background) -> None:
        """Follow the KV events of `intake` (None: of none) from now on, after calling `begin`.

        Both wait until the previous intake has ended, since until then it may write to the same slot of the map.
        """
        self.intake = intake

        def start() -> None:
            if not self.gone:
                begin()
                if intake is not None and self.intake is intake:
                    self.listening = background.spawn("KV events", intake.run, on_failure=intake.resync)

        self._stop_listening(start)

    def _stop_listening(self, then: Callable[[], None]) -> None:
        if self.listening is None or self.listening.done():
            then()
        else:
            self.listening.add_done_callback(lambda _: then())
            self.listening.cancel()

    def stop(self, then: Callable[[], None] = lambda: None) -> None:
        """Close connections and stop following KV events; call `then` once nothing writes to the slot of the map."""
        self.gone = True
        self.pool.close()
        self._stop_listening(then)
        if self.forwarding.checking is not None:
            self.forwarding.checking.cancel()
