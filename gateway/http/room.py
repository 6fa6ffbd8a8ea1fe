"""The limit on clients' connections: which to close or to refuse when the process nears its limit of open files."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import OrderedDict
from time import monotonic
from typing import Generic, Protocol, TypeVar

log = logging.getLogger("hitherto.wire")

# Clients' connections must leave a reserve of file descriptors for connections to replicas and for the gateway's own
# work. The reserve is a quarter of the limit of open files, and at most this many descriptors. TLS handshakes under way
# may use half of the reserve, and refused connections that are not closed yet a quarter of it.
MOST_RESERVED = 8192
FEWEST_FILES = 4096  # a lower limit is worth a warning: this allows 1,500 streams, the usual one is 524,288 or more
OWN_FILES = 30  # files of a gateway with three replicas, counted on Linux: log, listening sockets, probes, KV events
# The most TLS handshakes under way: each takes 55 kB, and one whose client sends nothing ends after `head_seconds`.
MOST_HANDSHAKES = 4096
LOOKS = 64  # how many more idle connections than needed are checked; nearly always the first one can be closed
SAY_SECONDS = 60.0  # between two log lines
OPEN = "/proc/self/fd"
LISTED = 2048  # open files listed per sweep on average: listing 8,192 took 7 ms on a kernel before 6.2


class Connection(Protocol):
    """The methods of a client's connection that `Room` uses."""

    def can_give_way(self) -> bool: ...
    def abort(self) -> None: ...
    def refuse_at_once(self) -> None: ...


C = TypeVar("C", bound=Connection)


class Room(Generic[C]):
    """The clients' connections of one server, and the share of the process's open files that they may use.

    When the share is used up and a new connection comes, the one that has been idle longest is closed. If none is idle,
    the new one is refused with a 503. Without this share, the process would reach its limit of open files, and the
    event loop would reset new connections without an answer.
    """

    __slots__ = ("connections", "handshakes", "idle", "refused", "_others", "_skip", "_said_at")

    def __init__(self) -> None:
        self.connections: set[C] = set()
        self.handshakes: dict[asyncio.Task[None], None] = {}  # TLS handshakes under way, the oldest first
        self.idle: OrderedDict[C, None] = OrderedDict()  # connections without a request, the longest idle first
        self.refused: OrderedDict[C, None] = OrderedDict()  # refused and not closed yet, the oldest first
        self._others = 0  # open files that are not clients' connections, as last counted by `keep`
        self._skip = 0  # how many sweeps `keep` still has to skip
        self._said_at = float("-inf")

    @property
    def open(self) -> int:
        """The number of connections, including those whose TLS handshake is still under way."""
        return len(self.connections) + len(self.handshakes)

    @property
    def most_handshakes(self) -> int:
        """The most TLS handshakes that may be under way at once."""
        return min(MOST_HANDSHAKES, _reserved() // 2)

    def enter(self, client: C) -> bool:
        """Add a new connection; return False if no file is free for it, so its first request has to be refused.

        If too many refused connections are open, the oldest of them gets its 503 at once and is closed.
        """
        self.connections.add(client)
        if self.admit(client):
            self.idle[client] = None
            return True
        self.refused[client] = None
        if len(self.refused) > max(1, _reserved() // 4):
            self.refused.popitem(last=False)[0].refuse_at_once()
        return False

    def admit(self, client: C) -> bool:
        """Return whether a file descriptor is free for this connection; an idle connection may be closed to free one.

        The connection is either new or was refused before. If admitted, it no longer counts as refused.
        """
        if self._short_by() > 0 and not self._make_room(1):
            return False
        self.refused.pop(client, None)
        return True

    def leave(self, client: C) -> None:
        """Remove a connection that was closed."""
        self.connections.discard(client)
        self.idle.pop(client, None)
        self.refused.pop(client, None)

    def keep(self) -> None:
        """Count the open files that are not clients' connections, and close idle connections if too few files are left.

        Too few are left if fewer than the reserve (`_reserved`) are free. Called at each sweep, because every stream
        opens a file for the connection to its replica.
        """
        if self._skip:
            self._skip -= 1
            return
        try:
            count = os.stat(OPEN).st_size  # 0 before Linux 6.2
            if not count:
                count = len(os.listdir(OPEN))
                self._skip = count // LISTED
        except OSError:  # no descriptor is left to list them with
            count, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._others = max(0, count - self.open)
        if (short := self._short_by()) > 0:
            self._make_room(short)

    def _short_by(self) -> int:
        """Return how many file descriptors of the reserve (`_reserved`) are in use; 0 or less if all of it is free."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return 0 if files == resource.RLIM_INFINITY else self._others + self.open - (files - _reserved())

    def _make_room(self, count: int) -> bool:
        """Close up to `count` idle connections, the longest idle first; return whether any was closed.

        A connection is kept if its last answer is not sent completely, or if its socket has the next request unread. It
        is then moved to the end of the list of idle connections.
        """
        closed = 0
        for _ in range(min(len(self.idle), count + LOOKS)):
            client = next(iter(self.idle))
            if client.can_give_way():
                del self.idle[client]
                client.abort()
                closed += 1
                if closed == count:
                    break
            else:
                self.idle.move_to_end(client)
        if closed and (now := monotonic()) - self._said_at > SAY_SECONDS:
            self._said_at = now
            log.warning(
                "idle connections of clients are closed, since the process nears its limit of open files (%d): raise it"
                " (LimitNOFILE, `ulimit -Hn`)",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
        return closed > 0


def too_few(files: int) -> str:
    """Return a warning that this limit of open files allows few streams; "" if the limit is at least FEWEST_FILES.

    Each stream takes two files: the connection to its client and the one to its replica.
    """
    if files == resource.RLIM_INFINITY or files >= FEWEST_FILES:
        return ""
    streams = max(0, files - _reserved(files) - OWN_FILES) // 2
    return f"{files} at most, which are about {streams} streams at once; without any left it answers 503 gateway_full"


def _reserved(files: int | None = None) -> int:
    """Return how many file descriptors clients' connections must leave free.

    `files`: the limit of open files; None for the limit that this process has now.
    """
    if files is None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_RESERVED if files == resource.RLIM_INFINITY else min(files // 4, MOST_RESERVED)
