"""EventIntake: one replica's cache events, from its sockets into the map.

What was missed is asked for again: everything when connecting, the missing batches on a gap.
What cannot be had again means that we no longer know what the replica holds: it is cleared
and filled anew from what comes. A replica that computes blocks but reports none is
`unobserved`: its cache is modelled until events come.
"""

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import groupby
from time import time

from cachemap.events.apply import EventApplier
from cachemap.events.records import UNTOLD, Batch, Blocks, Cleared, Decoder, EventError, Removed, Stored
from cachemap.events.sequence import Order, classify
from cachemap.events.sockets import publisher_of, replay, snapshot
from cachemap.events.zmtp import MOST_FRAME, MOST_QUEUED, WAKE_SECONDS, Inbox, connected
from cachemap.map import CacheMap

log = logging.getLogger("hitherto")

RETRY_SECONDS = (1.0, 30.0)  # between attempts to have all replayed, doubling
# Until an endpoint that neither answers nor refuses is called unreachable; and one that has answered, until what was
# heard of it is void: an engine that died is noticed by then, and a broken connection is made again within a fraction
# of a second.
LINK_SECONDS, LINK_LOST_SECONDS = 1.0, 5.0
SILENT_REQUESTS = 4  # requests with new blocks that finish without a BlockStored ...
SILENT_SECONDS = 2.0  # ... over at least this time: events come within a step, 0.1 s

COMPLAINTS = 5
# Until a publisher that gives snapshots has told its id; live batches kept while one is made; its own applied at once.
PUBLISHER_SECONDS, MOST_SINCE, SNAPSHOT_PIECE = 3.0, 4096, 16
# In bytes as they came: an engine that is busy sends about a tenth of this while its snapshot is awaited.
MOST_SINCE_BYTES = 1 << 24

BIG = 1 << 16  # bytes of a payload that is decoded in a thread: 8 MiB take half a second

SEQUENCE = struct.Struct(">Q")

Numbered = tuple[int, Batch]


class EventIntake:
    """Follows one replica; `run` until cancelled.

    `endpoint` and `replay` are ZMQ addresses of the engine's PUB and ROUTER sockets, `snapshot` that of one that tells
    all that the engine holds, which is asked before `replay` where there is one;
    `topic` is the prefix its messages must have; `decode` reads their payload. `model`, `block_size` and `looks_ahead`
    must be those prompts are hashed with; `told`: what the engine's blocks are by events that were read before;
    `page_size`: of the parts of a block that the engine finds too, None if it finds whole ones only.
    `on_change(state, reason)` is called when `state` changes or the replica's blocks had to be forgotten; states are
    connecting, live, gap and unobserved.
    `on_unreachable()` is called when the engine's publisher cannot be reached, before the map is told so.
    """

    def __init__(
        self,
        cache_map: CacheMap,
        slot: int,
        *,
        endpoint: str,
        replay: str | None,
        snapshot: str | None = None,
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
        self._endpoint, self._replay_endpoint, self._snapshot_endpoint = endpoint, replay, snapshot
        self._topic = topic.encode()
        self._decode = decode
        self._on_change, self._on_unreachable = on_change, on_unreachable
        self._events = EventApplier(cache_map, slot, model, block_size, looks_ahead, told)
        self._pages = page_size is not None and page_size < block_size

        self._inbox: Inbox | None = None
        self._last_timestamp = 0.0
        self._publisher = b""  # the id of the process that events come from, of engines that tell it
        self._replay_wanted = replay is not None or snapshot is not None
        self._since: list[Numbered] | None = None  # what came live since a snapshot was asked for
        self._since_bytes = 0  # of it, as it came
        # the record, its begin
        self._asked: tuple[AsyncGenerator[list[Numbered], None], asyncio.Task[list[Numbered] | None]] | None = None
        self._resuming = False  # go on after a batch that another applied, rather than start anew
        self._look_again = False
        self._replay_at = 0.0
        self._replay_pause = RETRY_SECONDS[0]
        self._linked = False  # the engine's publisher is connected, so the map may believe what it tells
        self._unlinked_at = self._linked_at = 0.0
        self.unreachable = False  # it was tried for long enough
        self._silent_requests = 0
        self._silent_since = 0.0
        self._foreign_topic: bytes | None = None
        self._forgotten = 0  # how often all was forgotten: what was being applied then ends there
        self.applying = False  # a batch is in the map in part
        self._void: dict[str | None, int] = {}  # by adapter: the last batch in which its name stood for another one

        self.state = "connecting"
        self.reason = "nothing heard yet"
        self.batches = 0
        self.gaps = 0
        self.replayed = 0
        self.malformed = 0
        self.unreadable = ""  # why, of the last of them
        self.too_long = 0  # connections that ended for what came over them
        self.passed_over = 0  # events that could not be read
        self.complaints: list[str] = []  # why, each cause once, the first few
        self.last_seq: int | None = None
        self.lag_seconds: float | None = None  # of the last live batch, by the engine's clock and ours

    @property
    def blocks_stored(self) -> int:
        return self._events.stored

    @property
    def stored_as(self) -> Blocks:
        """As of `EventApplier`."""
        return self._events.stored_as

    def believe(self, told: Blocks) -> None:
        """As of `EventApplier`."""
        self._events.believe(told)

    @property
    def blocks_removed(self) -> int:
        return self._events.removed

    @property
    def orphans(self) -> int:
        """Blocks left out because the block before them is not known."""
        return self._events.orphans

    @property
    def ignored(self) -> int:
        """Blocks left out because slower tiers keep them in chunks of another size, or for another cache group."""
        return self._events.ignored

    def reach(self, held: int, hashes: Sequence[int], seed: int, tokens: memoryview) -> int:
        """As of `EventApplier`."""
        return self._events.reach(held, hashes, seed, tokens)

    @property
    def position(self) -> tuple[int | None, float]:
        """The last batch applied: its number, None if none was, and when it was sent."""
        return self.last_seq, self._last_timestamp

    def resume(self, sequence: int | None, timestamp: float, observed: bool) -> None:
        """Before `run`: the map is as this batch left it, with the replica observed or not; go on from there. Where
        blocks are made of pages, the map does not tell which of those there are, so all is asked for again."""
        if self._pages:
            sequence = None
        self._want_replay()
        self.last_seq, self._last_timestamp = sequence, timestamp
        # twice: what is sent before our subscription has reached the engine is in no answer but the second
        self._resuming = self._look_again = self._replay_wanted and sequence is not None
        if observed and self.state == "unobserved":
            self._change("connecting", "another gateway saw events")
        elif (
            not observed and sequence is not None
        ):  # without any batch the other may not have reached the engine: we try anew
            self._change("unobserved", "another gateway saw no events")

    @property
    def unreplayed(self) -> bool:
        """The engine's record is wanted and has not come."""
        return self._replay_wanted

    @property
    def blind(self) -> list[str]:
        """As of `EventApplier`."""
        return self._events.blind

    @property
    def problems(self) -> list[str]:
        """What of this engine's events was not understood."""
        found = []
        if self.malformed:
            found.append(
                f"{self.malformed} KV event batches could not be read ({self.unreadable}): its engine may need a newer Hitherto"
            )
        if self.passed_over:
            why = "; ".join(self.complaints)
            found.append(f"{self.passed_over} KV events were passed over ({why}): its engine may need a newer Hitherto")
        if blind := self.blind:
            found.append(
                f"its KV events tell what comes to a store below it ({', '.join(blind)}) and not what goes, so nothing there is "
                "predicted: have that store keep a log of its events"
            )
        if self.too_long:
            found.append(
                f"its KV events ended the connection {self.too_long} times, with a frame of more than {MOST_FRAME >> 20} MiB, a message of more than "
                f"{MOST_QUEUED >> 20}, or what is not ZMQ's: what that told is lost"
            )
        return found

    async def run(self) -> None:
        """Read events until cancelled."""
        with connected("SUB", self._endpoint) as inbox:
            self._inbox, self._unlinked_at, self.unreachable = inbox, _now(), False
            if self.last_seq is None and self.state == "connecting":
                self._map.observed(self._slot, False)
            else:
                self._linked = True  # what is known came from there, by another gateway
            try:
                while True:
                    self._follow_link(inbox)
                    if self._asked is not None:
                        await self._answered(*self._asked)
                    elif self._replay_wanted and self._may_ask():
                        if self._resuming and self.last_seq is not None:
                            await self._catch_up(self.last_seq)
                        else:
                            self._ask()
                    while messages := inbox.take():
                        await self._take(messages)
                        await asyncio.sleep(0)
                    await inbox.changed(WAKE_SECONDS)
            finally:
                self._events.let_go()
                await self._unask()

    def _follow_link(self, inbox: Inbox) -> None:
        """While the publisher cannot be reached the replica's cache is modelled: a map that is told of no eviction
        would promise what is long gone."""
        self.too_long = inbox.faults
        if inbox.linked:
            self._unlinked_at = _now()
            if not self._linked:
                self._link()
            return
        away = _now() - self._unlinked_at
        if self._linked and away > LINK_LOST_SECONDS:
            self._unlink(f"the connection to {self._endpoint} was lost and cannot be made again")
        elif not self._linked and self.state == "connecting" and (inbox.refused or away > LINK_SECONDS):
            self._unlink(f"{self._endpoint} cannot be reached: {_unreached(inbox)}")

    def _link(self) -> None:
        """The publisher is there, for the first time or again: believe it from here on."""
        self._linked, self.unreachable, self._linked_at = True, False, _now()
        self._map.observed(self._slot, True)
        if self.state == "unobserved":
            self._want_replay()
            self._change("connecting", f"{self._endpoint} can be reached")

    def _unlink(self, reason: str) -> None:
        self._linked, self.unreachable = False, True
        self._on_unreachable()
        self._unobserve(reason)

    def resync(self) -> None:
        """Forget what the replica holds and ask for everything again."""
        self._forget()
        self._want_replay()

    def forget_adapter(self, name: str) -> None:
        """The name stands for another adapter from now on: what was stored under it before is never found again.

        Events do not say which of the two they mean, so those up to the last one are passed over when they are
        replayed.
        """
        self.void_adapter(name, self.last_seq)
        self.resync()

    def void_adapter(self, name: str, sequence: int | None) -> None:
        """As `forget_adapter`, where what is in the map is another gateway's to forget."""
        if sequence is not None:
            self._void[name] = sequence

    def held_up(self) -> None:
        """This process did not run until now: what the engine told meanwhile is there to be read, and a connection that
        broke may be made again."""
        self._silent_requests = 0
        if self._linked:
            self._unlinked_at = _now()

    def request_finished(self, prompt_blocks: int) -> None:
        """The replica finished a request of which `prompt_blocks` full blocks were new to it,
        so that it must have reported blocks by now or soon."""
        if prompt_blocks <= 0 or self.state == "unobserved":
            return
        if not self._silent_requests:
            self._silent_since = _now()
        self._silent_requests += 1
        silent = _now() - self._silent_since
        if self._silent_requests >= SILENT_REQUESTS and silent >= SILENT_SECONDS:
            self._unobserve(f"{self._silent_requests} requests finished but no block was reported")

    async def _take(self, messages: list[list[bytes]]) -> None:
        """Apply live messages. Another publisher than before is another process of the engine, which holds nothing of
        what was told."""
        if not self._linked:
            self._link()  # where a message comes from, somebody is
        for publisher, some in groupby(messages, publisher_of):
            if publisher and publisher != self._publisher:
                known, self._publisher = self._publisher, publisher
                if known:
                    await self._recover(Order.RESTART, 0)
            await self._take_in_order(list(some))

    async def _take_in_order(self, messages: list[list[bytes]]) -> None:
        """Apply what one publisher sent; where it does not follow on, first what is missing."""
        batches = await self._ours(messages)
        if self.state == "unobserved" and not self._events.fault and any(map(_stores, batches)):
            self._observe()
        run: list[Numbered] = []
        for number, batch in batches:
            last = (run[-1][0], run[-1][1].timestamp) if run else self.position
            order = self._order(last, number, batch)
            if order is not Order.CONTIGUOUS and order is not Order.STALE:
                await self._apply(run)
                run = []
                await self._recover(order, number)
                order = self._order(self.position, number, batch)
            if order is not Order.STALE:
                run.append((number, batch))
        await self._apply(run)
        if run:
            self.lag_seconds = max(0.0, time() - run[-1][1].timestamp)
        if self._since is not None and len(self._since) < MOST_SINCE and self._since_bytes < MOST_SINCE_BYTES:
            self._since += batches
            self._since_bytes += sum(len(frame) for frames in messages for frame in frames)
        if run and self.state in ("connecting", "gap"):
            self._change("live", "events come")

    def _order(self, last: tuple[int | None, float], number: int, batch: Batch) -> Order:
        """A publisher that tells its id tells by that when it starts over."""
        order = classify(*last, number, batch.timestamp)
        return Order.STALE if order is Order.RESTART and self._publisher else order

    async def _ours(self, messages: list[list[bytes]]) -> list[Numbered]:
        """The batches in messages of our topic."""
        ours = [frames for frames in messages if frames[0].startswith(self._topic)]
        if len(ours) < len(messages):
            self._foreign_topic = next(m[0] for m in messages if not m[0].startswith(self._topic))[:100]
        return await self._numbered(ours)

    async def _numbered(self, messages: list[list[bytes]]) -> list[Numbered]:
        numbered = []
        for frames in messages:
            try:
                numbered.append((SEQUENCE.unpack_from(frames[-2])[0], await self._decoded(frames[-1])))
            except (EventError, struct.error, IndexError) as error:
                self.malformed += 1
                self.unreadable = str(error)[:200]
        return numbered

    async def _decoded(self, payload: bytes) -> Batch:
        """Raises EventError."""
        return self._decode(payload) if len(payload) < BIG else await asyncio.to_thread(self._decode, payload)

    async def _recover(self, order: Order, number: int) -> None:
        """A batch came that does not follow the last: fetch what is missing, or start anew."""
        if order is Order.GAP and self.last_seq is not None:
            self.gaps += 1
            lost = f"batches {self.last_seq + 1} to {number - 1} were lost"
            self._change("gap", lost)
            if await self._replay_missing(number):
                self._change("live", f"{lost} and replayed")
                return
            self._forget()
            self._change("gap", f"{lost} and cannot be replayed: cleared", tell=True)
            self._want_replay()
        elif order is Order.RESTART:
            await self._unask()  # it may be its predecessor that answers
            self._void.clear()
            self._forget()
            self._change("gap", "the engine restarted: cleared", tell=True)
            self._want_replay()

    def _want_replay(self) -> None:
        self._replay_wanted = self._replay_endpoint is not None or self._snapshot_endpoint is not None
        self._resuming = False
        self._replay_at, self._replay_pause = 0.0, RETRY_SECONDS[0]
        if self._inbox is not None:
            self._inbox.wake()

    async def _catch_up(self, last: int) -> None:
        """What came after the `last` batch. If the engine no longer has that one, or another under its number, it is
        not known what was missed: all anew."""
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
            self._forget()
            self._change("gap", "the engine no longer has what was missed: cleared", tell=True)
            self._want_replay()
            return
        self._replayed("caught up")
        if self._look_again:
            self._replay_wanted = self._resuming = True
            self._look_again, self._replay_at = False, _now() + RETRY_SECONDS[0]

    def _ask(self) -> None:
        """Ask for all that the engine still has. It may be long in answering, busy as it is when it has just started:
        what it tells meanwhile is not kept waiting."""
        record = self._everything()
        self._since = [] if self._snapshot_endpoint is not None else None
        self._since_bytes = 0

        async def begin() -> list[Numbered] | None:
            try:
                return await anext(record, None)
            finally:
                if self._inbox is not None:
                    self._inbox.wake()

        self._asked = record, asyncio.ensure_future(begin())

    async def _unask(self) -> None:
        self._since = None
        if self._asked is not None:
            record, begin = self._asked
            self._asked = None
            begin.cancel()
            await asyncio.gather(begin, return_exceptions=True)
            await record.aclose()

    async def _answered(
        self, record: AsyncGenerator[list[Numbered], None], begin: asyncio.Task[list[Numbered] | None]
    ) -> None:
        """Start anew from the record, once its begin is there; without an answer, ask again later."""
        if not begin.done():
            return
        told, since, self._since = self.last_seq, self._since, None
        try:
            if (run := begin.result()) is not None:
                self._forget()
            while run is not None:
                await self._apply(run)
                run = await anext(record, None)
            if since and self.last_seq is not None:
                await self._apply(_following(since, self.last_seq))
            if told is not None and self.last_seq is not None and told > self.last_seq:
                # what came live since the engine read its record out, and was forgotten with the rest
                await self._replay_missing(told + 1)
        except TimeoutError:
            self._try_again_later()
        else:
            self._replayed("all replayed")
        self._asked = None

    def _may_ask(self) -> bool:
        """Not before it is known whose snapshot it has to be; whoever gives one sends a batch each second."""
        at = self._replay_at
        if self._snapshot_endpoint is not None and not self._publisher:
            at = max(at, self._linked_at + PUBLISHER_SECONDS)
        return self._linked and _now() >= at

    def _try_again_later(self) -> None:
        self._replay_at = _now() + self._replay_pause
        self._replay_pause = min(2 * self._replay_pause, RETRY_SECONDS[1])

    def _replayed(self, reason: str) -> None:
        self._replay_wanted = self._resuming = False
        if self.state != "unobserved":
            self._change("live", reason)

    async def _replay_missing(self, number: int) -> bool:
        """Apply what lies between the last batch and batch `number`; whether that was all."""
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

    async def _everything(self) -> AsyncGenerator[list[Numbered], None]:
        """All that the engine holds, by its snapshot, else by its record."""
        if run := await self._taken():
            for at in range(0, len(run), SNAPSHOT_PIECE):
                yield run[at : at + SNAPSHOT_PIECE]
                await asyncio.sleep(0)
            return
        if self._replay_endpoint is None:
            raise TimeoutError("the engine has given no snapshot")
        async for record in self._record(0):
            yield record

    async def _taken(self) -> list[Numbered]:
        """Its snapshot, as batches that all have the number of the last one in it; [] where there is none to use: of
        another process, unreadable, or with what an adapter's name stood for before."""
        if self._snapshot_endpoint is None or not self._publisher or self._void:
            return []
        try:
            told = await snapshot(self._snapshot_endpoint)
            if told is None or told.publisher != self._publisher:
                return []
            batches = [await self._decoded(payload) for payload in told.payloads] or [Batch(0.0, [], [])]
            return [(told.sequence, batch) for batch in batches]
        except (EventError, ValueError, TimeoutError) as error:
            self.unreadable = str(error)
            return []

    async def _record(self, start: int) -> AsyncGenerator[list[Numbered], None]:
        if self._replay_endpoint is None:
            return
        async for messages in replay(self._replay_endpoint, start):
            publisher = publisher_of(messages[0])
            if publisher and publisher != self._publisher:
                if start and self._publisher:
                    return  # what was missing is another process's
                self._publisher = publisher
            if run := await self._numbered(messages):
                self.replayed += len(run)
                yield run

    async def _apply(self, run: list[Numbered]) -> None:
        if not run:
            return
        stored, forgotten = self._events.stored, self._forgotten
        events = [event for _, batch in run for event in batch.events]
        if self._void:
            events = [event for number, batch in run for event in batch.events if not self._is_void(number, event)]
        self.applying = True
        try:
            for _ in self._events.applying(events):
                await asyncio.sleep(0)
                if forgotten != self._forgotten:
                    return
        except asyncio.CancelledError:  # nobody could go on from the middle of a batch
            self._forget()
            raise
        except Exception as error:  # a fault of ours with what this engine tells, and of no other replica
            log.exception("KV events that were decoded cannot be applied")
            self._events.fault = f"its KV events cannot be applied: {error!r}"[:300]
        finally:
            self.applying = False
        self.batches += len(run)
        for _, batch in run:
            if batch.passed_over:
                self._note(batch.passed_over)
        self.last_seq, self._last_timestamp = run[-1][0], run[-1][1].timestamp
        if self._events.fault:
            self._unobserve(self._events.fault)
        elif self._events.stored > stored:
            self._silent_requests = 0

    def _note(self, complaints: list[str]) -> None:
        self.passed_over += len(complaints)
        for why in complaints:
            if why not in self.complaints and len(self.complaints) < COMPLAINTS:
                self.complaints.append(why)
                self._on_change(self.state, f"events that cannot be read are passed over: {why}")

    def _is_void(self, number: int, event: Stored | Removed | Cleared) -> bool:
        return isinstance(event, Stored) and number <= self._void.get(event.adapter, -1)

    def _forget(self) -> None:
        self._forgotten += 1
        self._events.forget()
        self.last_seq, self._last_timestamp = None, 0.0

    def _observe(self) -> None:
        """Events come after all: follow them, from all the engine still has."""
        self._map.observed(self._slot, True)
        self._forget()
        self._want_replay()
        self._change("live", "events come again")

    def _unobserve(self, reason: str) -> None:
        if self._foreign_topic is not None:
            seen, wanted = self._foreign_topic.decode("utf-8", "replace"), self._topic.decode()
            reason += f"; events come under topic {seen!r}, expected {wanted!r}"
        reason = "; ".join([reason, *self.problems])
        self._silent_requests = 0
        self._map.observed(self._slot, False)
        self._change("unobserved", reason)

    def _change(self, state: str, reason: str, tell: bool = False) -> None:
        tell = tell or state != self.state
        self.state, self.reason = state, reason
        if tell:
            self._on_change(state, reason)


def _following(batches: list[Numbered], last: int) -> list[Numbered]:
    """Those that follow on number `last`, up to the first hole."""
    found: list[Numbered] = []
    for one in batches:
        if one[0] == last + len(found) + 1:
            found.append(one)
    return found


def _unreached(inbox: Inbox) -> str:
    """Why, and what to do."""
    why = "nothing listens there" if inbox.refused else f"no ZMQ publisher answered within {LINK_SECONDS:g} s"
    return (
        f"{why}; let the gateway reach the engine's event port, "
        "or give the address as URL#events=tcp://HOST:PORT,replay=tcp://HOST:PORT"
    )


def _stores(one: Numbered) -> bool:
    return any(isinstance(event, Stored) for event in one[1].events)


def _now() -> float:
    return asyncio.get_running_loop().time()
