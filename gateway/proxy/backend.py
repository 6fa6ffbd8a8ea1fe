"""A replica as the proxy uses it: its load and costs, its part of the map of cached KV blocks, its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from cachemap.events.records import UNTOLD, Blocks
from replicas.lifecycle import ENGINE_THERE, State

from ..http.messages import HOP_BY_HOP
from ..http.upstream import Pool, Sink, UpstreamError
from .exactness.drift import Drift
from .exactness.token_ids import Forwarding
from .failures.blame import MOST_AGREED
from .failures.retries import CONNECT, OWN, REPLACED

if TYPE_CHECKING:
    from cachemap import EventIntake
    from cachemap.background import Background
    from policies import Candidate
    from replicas import Replica
    from replicas.event_source import EventSource
    from replicas.pairing import Traits

# Costs are learned from one answer per LEARN_SECONDS on average, and from up to LEARN_AT_ONCE in a burst. Learning from
# an answer takes 15 to 20 us, and a hundred answers a second are enough for a cost coefficient to follow any change.
# Bursts are learned from completely, because the first or the last answer of a batch alone would show less load on the
# replica than there is.
LEARN_SECONDS, LEARN_AT_ONCE = 0.01, 100
# Headers that the gateway does not forward, since it writes its own: bodies are collected and sent with their length.
NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"transfer-encoding", b"expect", b"x-request-id"}
MOST_ADAPTERS = 4096  # LoRA adapters of one replica, present and past, whose folders are remembered


Prove = Callable[[str], Awaitable[bool]]


async def taken_at_its_word(replica: str) -> bool:
    """Accept any process at the replica's address, for gateways that do not check which process listens there."""
    return True


class Backend:
    """One replica with its connections, its part of the map of cached KV blocks, and what was learned about it."""

    def __init__(
        self,
        replica: Replica,
        candidate: Candidate,
        prove: Prove = taken_at_its_word,
        hidden: frozenset[bytes] = frozenset(),
    ):
        """Create the state, with a pool of connections that has none yet.

        `candidate`: the replica as the Router sees it.
        `prove(id)`: has the replica's watcher check now which process listens at its address; returns whether an engine
            answered.
        `hidden`: names of client headers that are not forwarded to this replica, in lower case.
        """
        self.replica, self.candidate, self.prove, self.hidden = replica, candidate, prove, hidden
        self.id, self.slot = replica.id, candidate.slot
        self.pool = self._new_pool()
        self.drift = Drift()
        self.forwarding = Forwarding()
        self.keeps_nothing: set[str] = set()  # paths at which it computed a prompt for a decoder and kept no KV cache
        self.learn_at = 0.0  # costs are not learned from answers before this time, in monotonic seconds
        self.source: EventSource | None = None  # the source of `intake`
        self.intake: EventIntake | None = None  # reads its KV events into the map of cached blocks
        self.listening: asyncio.Task[None] | None = None  # runs `intake`, or its predecessor until that has ended
        self.adapter_roots: dict[str, str] = {}  # adapter -> the folder that it was last reported to be loaded from
        # The format of blocks for `intake`: tokens per block, and how many tokens after a block its hash includes.
        self.event_format: tuple[int, int] | None = None
        self.gone = False  # it was removed; requests that still run on it are not counted
        self._begin(None)

    def _begin(self, incarnation: str | None) -> None:
        """Reset all that is learned about the replica's process; called at first, and for each new process."""
        self.incarnation = incarnation
        self.host_line, self.not_forwarded = self._head_parts()
        self.failures = 0  # error answers in a row; a 2xx resets it
        self.answers = 0  # answered requests that are not yet reported to the health checks
        self.pace = 0.0  # mean seconds per output token of non-streamed answers, prefill included; 0 before the first
        # It refused a request as full, and is chosen only if all others are full until then, in monotonic seconds.
        self.full_until = 0.0
        self.stored_as: Blocks = UNTOLD  # the kind of blocks that it stores, as last reported or seen in events
        self.said_to_drop: bool | None = None  # whether it last reported to recompute the last cached block it finds

    def _new_pool(self) -> Pool:
        replica = self.replica
        return Pool(replica.address or replica.host, replica.port, replica.tls, replica.host)

    def connect(self, sink: Sink) -> None:
        """Open a connection to the replica's present process, and call `sink.connected` or `sink.lost`."""
        self.pool.connect(sink, partial(self._check, self.replica.incarnation))

    async def _check(self, incarnation: str) -> UpstreamError | None:
        """Return why a connection that was just opened must not be used, or None if it may be.

        It must lead to the process for which it was opened (`incarnation`), and that process must accept new requests.
        The replica's watcher keeps a connection to the process. As long as that is open, the same process listens at
        the address. Once it has closed, the watcher checks models, version and process again before this returns. The
        new connection was open during that check. So the check holds for it, even if the engine has closed it
        meanwhile.
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
        """Return the lines to add to every request head for this replica, and the client's headers to leave out.

        The lines are `host` and the replica's configured headers. The headers to leave out are a set of names in lower
        case.
        """
        ours, transfer = {**self.replica.headers, **self.replica.credentials}, self.replica.transfer
        chosen = {name.lower().encode(): value.encode() for name, value in ours.items()}
        lines = b"".join(b"%b: %b\r\n" % header for header in chosen.items())
        return b"host: %b\r\n%b" % (self.replica.url.partition("://")[2].encode(), lines), NOT_FORWARDED.union(
            chosen, self.hidden, () if transfer is None or not transfer.header else (transfer.header,)
        )

    def follow_incarnation(self) -> None:
        """Reset what was learned about the replica, since it is another process now, perhaps at another address."""
        self._begin(self.replica.incarnation)
        self.adapter_roots = dict(self.replica.adapter_roots)
        self.drift.reset()
        self.keeps_nothing.clear()
        if self.pool.host != self.replica.address:
            self.pool.retire()
            self.pool = self._new_pool()

    def adapters_moved(self) -> list[str]:
        """Return the LoRA adapters that are now loaded from another folder than when the replica last reported them.

        An adapter may have been absent in between. The present folders are remembered for the next call.
        """
        told = self.replica.adapter_roots
        moved = [name for name, root in told.items() if self.adapter_roots.get(name, root) != root]
        self.adapter_roots |= told
        while len(self.adapter_roots) > MOST_ADAPTERS:
            del self.adapter_roots[next(iter(self.adapter_roots))]
        return moved

    @property
    def traits(self) -> Traits:
        """The replica's properties that decide with which other replicas it can exchange KV caches."""
        return self.replica.traits

    @property
    def is_witness(self) -> bool:
        """Whether an error answer of this replica counts as evidence that the request is at fault.

        It does not once the replica has failed too many requests in a row (`MOST_AGREED`).
        """
        return self.failures < MOST_AGREED

    @property
    def is_finer(self) -> bool:
        """Whether a cache hit of the engine may end inside one of the blocks by which prompts are hashed."""
        page, (size, _) = self.replica.page_size, self.event_format or (0, 0)
        parts = self.stored_as.parts if self.replica.finds_parts else 0
        return 0 < parts < size or (page is not None and page < size)

    def serves(self, model: str | None) -> bool:
        return self.replica.serves(model)

    def may_learn(self, now: float) -> bool:
        """Return whether costs may be learned from an answer at `now` (monotonic seconds); if so, count the answer.

        One answer per `LEARN_SECONDS` (10 ms) is allowed on average, and up to `LEARN_AT_ONCE` (100) in a burst.
        """
        if self.learn_at > now:
            return False
        self.learn_at = max(self.learn_at, now - LEARN_SECONDS * LEARN_AT_ONCE) + LEARN_SECONDS
        return True

    def listen(self, intake: EventIntake | None, begin: Callable[[], None], background: Background) -> None:
        """Stop the previous intake of KV events, call `begin`, then read events with this intake (None: read none).

        `begin` and the reading wait until the previous intake has ended, since it may still write to this replica's
        part of the map.
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
        """Close the connections and stop reading KV events, since the replica is removed.

        `then` is called once nothing writes to this replica's part of the map any more.
        """
        self.gone = True
        self.pool.close()
        self._stop_listening(then)
        if self.forwarding.checking is not None:
            self.forwarding.checking.cancel()
