"""The intake of one replica's KV cache events, from the engine's sockets into the map.

An engine publishes its events in numbered batches. The intake requests again (a replay) what it missed: everything on
connecting, the missing batches after a gap. If the engine no longer has them, it is unknown what the replica holds: the
map forgets the replica's blocks and starts again from new events. A replica that computes blocks but reports none is
`unobserved`: its cache is modelled until events come.
"""

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator, Callable
from time import monotonic, time
from typing import Any

from cachemap.events.apply import EventApplier
from cachemap.events.records import UNTOLD, Batch, Blocks, Decoder, EventError, Stored
from cachemap.events.sequence import Order, classify
from cachemap.events.sockets import replay
from cachemap.events.zmtp import MOST_FRAME, MOST_QUEUED, WAKE_SECONDS, Inbox, connected
from cachemap.map import CacheMap

log = logging.getLogger("hitherto")

RETRY_SECONDS = (1.0, 30.0)  # the first and the longest pause between requests for a replay of everything; it doubles
# How long an endpoint may neither answer nor refuse before it counts as unreachable: LINK_SECONDS on the first attempt,
# LINK_LOST_SECONDS after it has once answered. By then a dead engine has been noticed, and a connection that
# merely broke has been made again, which takes a fraction of a second.
LINK_SECONDS, LINK_LOST_SECONDS = 1.0, 5.0
# A replica counts as reporting no events if SILENT_REQUESTS requests with new blocks finish without a stored block
# being reported, over at least SILENT_SECONDS. Events come within an engine step, 0.1 s.
SILENT_REQUESTS = 4
SILENT_SECONDS = 2.0

# After a gap in the events or a restart of the engine, the map's blocks are repaired or start again from nothing. This
# may happen RECOVERIES times in a row, and once more every RECOVERY_SECONDS. Each time takes about 1 ms and a log line.
RECOVERIES, RECOVERY_SECONDS = 10, 10.0

COMPLAINTS = 5  # distinct reasons for unreadable events that are kept for operators

# After applying events for so long, the intake lets other tasks run. It first ends its present step, which takes about
# 5 ms (`MOST_PIECE`).
TURN_SECONDS = 0.005
BIG = 1 << 16  # bytes from which a payload is decoded in a thread: 8 MiB take half a second

SEQUENCE = struct.Struct(">Q")

Numbered = tuple[int, Batch]


class EventIntake:
    """The intake of one replica's KV cache events, from its engine into the map; `run` it until cancelled.

    `slot`: the replica's index in the map.
    `endpoint`, `replay`: ZMQ addresses of the engine's PUB and ROUTER sockets; `replay` is None if it has no ROUTER.
    `topic`: the prefix that a message's topic must have.
    `decode`: a function that turns a message's payload into a Batch.
    `model`, `block_size`, `looks_ahead`: those with which prompts are hashed; `looks_ahead` is how many tokens after a
    block the block's name also covers.
    `told`: the engine's block format as earlier events showed it.
    `page_size`: tokens in the smallest part of a block that the engine finds; None if it finds only whole blocks.
    `on_change(state, reason)`: called when `state` changes or the replica's blocks had to be forgotten; states are
    connecting, live, gap (batches were lost) and unobserved.
    `on_unreachable()`: called when the engine's publisher cannot be reached, before the map is changed for that reason.
    Attributes that are not defined here are those of the `EventApplier`: what was stored, removed and left out.
    """

    blocks_stored: int
    blocks_removed: int
    stored_as: Blocks

    def __init__(
        self,
        cache_map: CacheMap,
        slot: int,
        *,
        endpoint: str,
        replay: str | None,
        topic: str = "",
        decode: Decoder,
        model: str,
        block_size: int,
        looks_ahead: int = 0,
        told: Blocks = UNTOLD,
        page_size: int | None = None,
        on_change: Callable[[str, str], None] = lambda state, reason: None,
        on_unreachable: Callable[[], None] = lambda: None,
    ):
        self._map = cache_map
        self._slot = slot
        self._endpoint, self._replay_endpoint = endpoint, replay
        self._topic = topic.encode()
        self._decode = decode
        self._on_change, self._on_unreachable = on_change, on_unreachable
        self._events = EventApplier(cache_map, slot, model, block_size, looks_ahead, told)
        self.reach = self._events.reach  # called for each request
        self._pages = page_size is not None and page_size < block_size

        self._inbox: Inbox | None = None
        self._last_timestamp = 0.0
        self.unreplayed = replay is not None  # a replay of the engine's events is still to come
        # The replay that was requested, and the task that waits for its first batches.
        self._asked: tuple[AsyncGenerator[list[Numbered], None], asyncio.Future[list[Numbered] | None]] | None = None
        self._resuming = False  # continue after a batch that another gateway applied, rather than start from nothing
        self._look_again = False  # after catching up, the batches since then are requested once more
        self._replay_at = 0.0  # when the next replay may be requested
        self._replay_pause = RETRY_SECONDS[0]
        self._linked = False  # the engine's publisher is connected, so the map may follow its events
        self._unlinked_at = 0.0
        self.unreachable = False  # set once connecting has failed for long enough
        self._silent_requests = 0
        self._silent_since = 0.0
        self._foreign_topic: bytes | None = None
        self._forgotten = 0  # how often all blocks were forgotten; a change stops the batches that are being applied
        # When other tasks last had a turn, by time.monotonic, since uvloop's own clock stands still while a task runs.
        self._resumed = 0.0
        self.applying = False  # a batch is partly applied
        self._recoveries, self._recovered_at = float(RECOVERIES), 0.0  # how many were left, and when
        # The replica is unobserved only because no recovery was left, and a replay could show its blocks again.
        self._exhausted = False
        self._void: dict[str | None, int] = {}  # by adapter name, the last batch in which it stood for another adapter

        self.state = "connecting"
        self.reason = "nothing heard yet"
        self.batches = 0
        self.gaps = 0
        self.replayed = 0
        self.malformed = 0
        self.unreadable = ""  # the reason for the last malformed batch
        self.too_long = 0  # connections that were closed because of what came over them
        self.passed_over = 0  # events that could not be read
        self.complaints: list[str] = []  # the first few distinct reasons why events could not be read
        self.last_seq: int | None = None  # the number of the last batch applied
        # Seconds from when the engine sent the last live batch (by its clock) to when it was applied (by ours).
        self.lag_seconds: float | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_events":
            raise AttributeError(name)
        return getattr(self._events, name)

    @property
    def position(self) -> tuple[int | None, float]:
        """The number of the last batch applied (None if there is none), and the time at which the engine sent it."""
        return self.last_seq, self._last_timestamp

    def resume(self, sequence: int | None, timestamp: float, observed: bool) -> None:
        """Continue after batch `sequence`, which another gateway applied, instead of starting from nothing.

        Call this before `run`, with the map in the state after that batch. `timestamp`: when the engine sent the batch.
        `observed`: the other gateway followed the replica's events. If the engine's pages are smaller than the map's
        blocks, everything is requested again, as the map has no pages.
        """
        if self._pages:
            sequence = None
        self._want_replay()
        self._exhausted = False
        self.last_seq, self._last_timestamp = sequence, timestamp
        # Request a replay twice: batches sent before our subscription has reached the engine are only in the second.
        self._resuming = self._look_again = self.unreplayed and sequence is not None
        if observed and self.state == "unobserved":
            self._change("connecting", "another gateway saw events")
        elif (
            not observed and sequence is not None
        ):  # without any batch, the other gateway may not have reached the engine: then this one tries for itself
            self._change("unobserved", "another gateway saw no events")

    @property
    def problems(self) -> list[str]:
        """Messages for operators about events of this engine that were lost or not understood."""
        found = []
        newer = "its engine may need a newer Hitherto"
        if self.malformed:
            found.append(f"{self.malformed} KV event batches could not be read ({self.unreadable}): {newer}")
        if self.passed_over:
            why = "; ".join(self.complaints)
            found.append(f"{self.passed_over} KV events were passed over ({why}): {newer}")
        if self._events.blind:
            found.append(
                f"its KV events tell what comes to a store below it ({', '.join(self._events.blind)}) and not what goes, so nothing there is "
                "predicted: have that store keep a log of its events"
            )
        if self.too_long:
            found.append(
                f"its KV event connection was closed {self.too_long} times: for a frame above {MOST_FRAME >> 20} MiB, a message above "
                f"{MOST_QUEUED >> 20} MiB, or bytes that are not ZMQ's; those events are lost"
            )
        return found

    async def run(self) -> None:
        """Read the engine's events and apply them to the map, until cancelled."""
        with connected("SUB", self._endpoint) as inbox:
            self._inbox, self._unlinked_at, self.unreachable = inbox, _now(), False
            if self.last_seq is None and self.state == "connecting":
                self._map.observed(self._slot, False)
            else:
                self._linked = True  # the map's contents come from this publisher, through another gateway
            try:
                while True:
                    self._follow_link(inbox)
                    if self._asked is not None:
                        await self._answered(*self._asked)
                    elif self.unreplayed and self._linked and _now() >= self._replay_at:
                        if self._resuming and self.last_seq is not None:
                            await self._catch_up(self.last_seq)
                        else:
                            self._ask(inbox)
                    if self._exhausted and self._linked and self._recoveries_left() >= 1:
                        self._follow_again("another recovery is allowed")
                    while messages := inbox.take():
                        await self._take(messages)
                        await self._let_others_run()
                    await inbox.changed(WAKE_SECONDS)
                    self._resumed = monotonic()
            finally:
                self._events.let_go()
                await self._unask()

    def _follow_link(self, inbox: Inbox) -> None:
        """Check whether the engine's publisher can be reached; while it cannot, let the map model the replica's cache.

        A map that is not told of evictions would promise blocks that are long gone.
        """
        self.too_long = inbox.faults
        if inbox.linked:
            self._unlinked_at = _now()
            if not self._linked:
                self._link()
            return
        away = _now() - self._unlinked_at
        if self._linked and away > LINK_LOST_SECONDS:
            reason = f"the connection to {self._endpoint} was lost and cannot be made again"
        elif not self._linked and self.state == "connecting" and (inbox.refused or away > LINK_SECONDS):
            why = "nothing listens there" if inbox.refused else f"no ZMQ publisher answered within {LINK_SECONDS:g} s"
            reason = (
                f"{self._endpoint} cannot be reached: {why}; let the gateway reach the engine's event port, "
                "or give the address as URL#events=tcp://HOST:PORT,replay=tcp://HOST:PORT"
            )
        else:
            return
        self._linked, self.unreachable = False, True
        self._on_unreachable()
        self._unobserve(reason)

    def _link(self) -> None:
        """Make the map follow the replica's events, as the engine's publisher can now be reached (again)."""
        self._linked, self.unreachable = True, False
        self._map.observed(self._slot, True)
        if self.state == "unobserved":
            self._want_replay()
            self._change("connecting", f"{self._endpoint} can be reached")

    def resync(self) -> None:
        """Forget the replica's blocks, and request all recorded events from the engine again."""
        self._forget()
        self._want_replay()

    def _start_over(self, reason: str) -> None:
        self.resync()
        if self.state != "unobserved":  # else its cache is modelled until its events come again
            self._change("gap", reason, tell=True)

    def forget_adapter(self, name: str) -> None:
        """Forget all blocks of the replica, as a LoRA adapter's name now stands for another adapter, and start again.

        Events give only an adapter's name. Therefore blocks that were stored under it before now are skipped in the
        replay, as they may be of the former adapter.
        """
        self.void_adapter(name, self.last_seq)
        self.resync()

    def void_adapter(self, name: str, sequence: int | None) -> None:
        """Ignore blocks stored under this LoRA adapter's name in event batches up to number `sequence`.

        The map is not cleared.
        """
        if sequence is not None:
            self._void[name] = sequence

    def held_up(self) -> None:
        """Restart the timeouts after this process was stalled, as events that came meanwhile have not been read yet."""
        self._silent_requests = 0
        if self._linked:
            self._unlinked_at = _now()

    def request_finished(self, prompt_blocks: int) -> None:
        """Note that a request finished, so that a replica which reports no events is noticed.

        `prompt_blocks`: how many of the prompt's full blocks were new to the replica, so that it must report them soon.
        If 4 such requests (SILENT_REQUESTS) finish over at least 2 s (SILENT_SECONDS) without any report, the replica's
        cache is modelled (state "unobserved").
        """
        if prompt_blocks <= 0 or self.state == "unobserved":
            return
        if not self._silent_requests:
            self._silent_since = _now()
        self._silent_requests += 1
        silent = _now() - self._silent_since
        if self._silent_requests >= SILENT_REQUESTS and silent >= SILENT_SECONDS:
            self._unobserve(f"{self._silent_requests} requests finished but no block was reported")

    async def _take(self, messages: list[list[bytes]]) -> None:
        """Apply messages that the engine has just published; after a gap, first fetch the missing batches."""
        if not self._linked:
            self._link()  # a message shows that the publisher is there
        if self.state == "unobserved" and self._recoveries_left() < 1:
            return
        ours = [frames for frames in messages if frames[0].startswith(self._topic)]
        if len(ours) < len(messages):
            self._foreign_topic = next(m[0] for m in messages if not m[0].startswith(self._topic))[:100]
        batches = await self._numbered(ours)
        if (
            self.state == "unobserved"
            and not self._events.fault
            and any(isinstance(event, Stored) for _, batch in batches for event in batch.events)
        ):
            self._follow_again("events come again")
        run: list[Numbered] = []
        for number, batch in batches:
            last = (run[-1][0], run[-1][1].timestamp) if run else self.position
            order = classify(*last, number, batch.timestamp)
            if order in (Order.FIRST, Order.GAP, Order.RESTART):
                await self._apply(run)
                run = []
                if not await self._recover(order, number):
                    return
                order = classify(*self.position, number, batch.timestamp)
            if order is not Order.STALE:
                run.append((number, batch))
        await self._apply(run)
        if run:
            self.lag_seconds = max(0.0, time() - run[-1][1].timestamp)
            if self.state in ("connecting", "gap"):
                self._change("live", "events come")

    def _follow_again(self, reason: str) -> None:
        """Make the map follow the replica's events after it was unobserved, starting with a replay."""
        self._recoveries, self._exhausted = self._recoveries - 1, False
        self._map.observed(self._slot, True)
        self.resync()
        self._change("live", reason)

    async def _numbered(self, messages: list[list[bytes]]) -> list[Numbered]:
        """Return the event batches in these messages, each with its number.

        A large payload is decoded in a thread. Messages that cannot be read are counted in `malformed`.
        """
        numbered = []
        for frames in messages:
            try:
                (number,), payload = SEQUENCE.unpack_from(frames[-2]), frames[-1]
                big = len(payload) >= BIG
                numbered.append(
                    (number, await asyncio.to_thread(self._decode, payload) if big else self._decode(payload))
                )
            except (EventError, struct.error, IndexError) as error:
                self.malformed += 1
                self.unreadable = str(error)[:200]
        return numbered

    def _recoveries_left(self) -> float:
        """Return how many recoveries are allowed now: replays after gaps, and new beginnings after restarts.

        The number grows by one every 10 s (RECOVERY_SECONDS), up to 10 (RECOVERIES).
        """
        now = _now()
        more = (now - self._recovered_at) / RECOVERY_SECONDS
        self._recoveries, self._recovered_at = min(self._recoveries + more, RECOVERIES), now
        return self._recoveries

    async def _recover(self, order: Order, number: int) -> bool:
        """Fetch the batches missing before a batch that does not follow the last one, or start again from nothing.

        `order`: how the batch relates to the last one. `number`: the batch's number. Returns False if there were too
        many recoveries lately; then the replica's cache is modelled until another one is allowed.
        """
        if order is Order.FIRST:
            return True
        if order is Order.RESTART:
            self._void.clear()
        if self.state == "unobserved":  # everything is replayed once its events are followed again
            if order is Order.RESTART:
                self._forget()
            return True
        if self._recoveries_left() < 1:
            self._unobserve("its events had gaps or started again more often than can be followed")
            self._exhausted = self._replay_endpoint is not None and not self._events.fault
            return False
        self._recoveries -= 1
        if order is Order.GAP and self.last_seq is not None:
            self.gaps += 1
            lost = f"batches {self.last_seq + 1} to {number - 1} were lost"
            self._change("gap", lost)
            if await self._replay_missing(number):
                self._change("live", f"{lost} and replayed")
                return True
            self._start_over(f"{lost} and cannot be replayed: cleared")
        elif order is Order.RESTART:
            await self._unask()  # the engine's former process might answer
            self._start_over("the engine restarted: cleared")
        return True

    def _want_replay(self) -> None:
        self.unreplayed = self._replay_endpoint is not None
        self._resuming = False
        self._replay_at, self._replay_pause = 0.0, RETRY_SECONDS[0]
        if self._inbox is not None:
            self._inbox.wake()

    async def _catch_up(self, last: int) -> None:
        """Request and apply the event batches after batch number `last`, which another gateway applied.

        If the engine no longer has batch `last`, or has a different batch with this number, it is unknown what was
        missed, and everything is requested again.
        """
        follows = False
        try:
            async for run in self._record(last):
                if not follows:
                    follows = (run[0][0], run[0][1].timestamp) == self.position
                    if not follows:
                        break
                await self._apply([one for one in run if self.last_seq is None or one[0] > self.last_seq])
        except TimeoutError:
            self._try_again_later()
            return
        if not follows:
            self._start_over("the engine no longer has what was missed: cleared")
            return
        self._replayed("caught up")
        if self._look_again:
            self.unreplayed = self._resuming = True
            self._look_again, self._replay_at = False, _now() + RETRY_SECONDS[0]

    def _ask(self, inbox: Inbox) -> None:
        """Request all recorded batches from the engine, without waiting for the answer.

        A busy engine that has just started may answer late; its live events are applied meanwhile.
        """
        record = self._record(0)
        begin: asyncio.Future[list[Numbered] | None] = asyncio.ensure_future(anext(record, None))
        begin.add_done_callback(lambda _: inbox.wake())
        self._asked = record, begin

    async def _unask(self) -> None:
        if self._asked is not None:
            record, begin = self._asked
            self._asked = None
            begin.cancel()
            await asyncio.gather(begin, return_exceptions=True)
            await record.aclose()

    async def _answered(
        self, record: AsyncGenerator[list[Numbered], None], begin: asyncio.Future[list[Numbered] | None]
    ) -> None:
        """Rebuild the replica's blocks from the requested replay of events, once its first batches are there.

        `record`: the replay; `begin`: the task that waits for its first batches. Without an answer in time, the replay
        is requested again later.
        """
        if not begin.done():
            return
        told = self.last_seq
        try:
            if (run := begin.result()) is not None:
                self._forget()
            while run is not None:
                await self._apply(run)
                run = await anext(record, None)
            if told is not None and self.last_seq is not None and told > self.last_seq:
                # The live batches that came after the engine made its replay were applied, then forgotten above.
                await self._replay_missing(told + 1)
        except TimeoutError:
            self._try_again_later()
        else:
            self._replayed("all replayed")
        self._asked = None

    def _try_again_later(self) -> None:
        self._replay_at = _now() + self._replay_pause
        self._replay_pause = min(2 * self._replay_pause, RETRY_SECONDS[1])

    def _replayed(self, reason: str) -> None:
        self.unreplayed = self._resuming = False
        if self.state != "unobserved":
            self._change("live", reason)

    async def _replay_missing(self, number: int) -> bool:
        """Fetch and apply the event batches between the last one applied and batch `number`.

        Returns whether none is missing now.
        """
        if self._replay_endpoint is None or self.last_seq is None:
            return False
        try:
            async for run in self._record(self.last_seq + 1):
                if self.last_seq is None or run[0][0] > self.last_seq + 1:
                    return False
                await self._apply(run)
        except TimeoutError:
            pass
        return self.last_seq is not None and self.last_seq >= number - 1

    async def _record(self, start: int) -> AsyncGenerator[list[Numbered], None]:
        if self._replay_endpoint is None:
            return
        async for messages in replay(self._replay_endpoint, start):
            if run := await self._numbered(messages):
                self.replayed += len(run)
                yield run

    async def _let_others_run(self) -> None:
        """Let the event loop run other tasks if events have been applied for 5 ms (TURN_SECONDS) since it last could.

        Requests that are placed meanwhile see some events of an engine step and miss others, so it is not done sooner.
        """
        if monotonic() - self._resumed >= TURN_SECONDS:
            await asyncio.sleep(0)
            self._resumed = monotonic()

    async def _apply(self, run: list[Numbered]) -> None:
        if not run:
            return
        stored, forgotten, void = self._events.blocks_stored, self._forgotten, self._void
        events = [
            event
            for number, batch in run
            for event in batch.events
            if not void or not isinstance(event, Stored) or number > void.get(event.adapter, -1)
        ]
        self.applying = True
        try:
            for _ in self._events.applying(events):
                await self._let_others_run()
                if forgotten != self._forgotten:
                    return
        except asyncio.CancelledError:  # no gateway could continue from the middle of a batch
            self._forget()
            raise
        except Exception as error:  # an error in this code with this engine's events; other replicas are not affected
            log.exception("KV events that were decoded cannot be applied")
            self._events.fault = f"its KV events cannot be applied: {error!r}"[:300]
        finally:
            self.applying = False
        self.batches += len(run)
        for _, batch in run:
            self.passed_over += len(batch.passed_over)
            for why in batch.passed_over:
                if why not in self.complaints and len(self.complaints) < COMPLAINTS:
                    self.complaints.append(why)
                    self._on_change(self.state, f"events that cannot be read are passed over: {why}")
        self.last_seq, self._last_timestamp = run[-1][0], run[-1][1].timestamp
        if self._events.fault:
            self._unobserve(self._events.fault)
        elif self._events.blocks_stored > stored:
            self._silent_requests = 0

    def _forget(self) -> None:
        self._forgotten += 1
        self._events.forget()
        self.last_seq, self._last_timestamp = None, 0.0

    def _unobserve(self, reason: str) -> None:
        if self._foreign_topic is not None:
            seen, wanted = self._foreign_topic.decode("utf-8", "replace"), self._topic.decode()
            reason += f"; events come under topic {seen!r}, expected {wanted!r}"
        reason = "; ".join([reason, *self.problems])
        self._silent_requests, self._exhausted = 0, False
        self._map.observed(self._slot, False)
        self._change("unobserved", reason)

    def _change(self, state: str, reason: str, tell: bool = False) -> None:
        tell = tell or state != self.state
        self.state, self.reason = state, reason
        if tell:
            self._on_change(state, reason)


def _now() -> float:
    return asyncio.get_running_loop().time()
