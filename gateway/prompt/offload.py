"""Protection of the event loop from prompts that take long to prepare.

A body's size does not determine its time: 39 kB of a known conversation take 0.1 ms, 39 kB of one letter 9 ms, and 30
kB in 900 messages 90 ms in the one request whose shape is compiled. So code about to do long work checks whether the
event loop waits for it, and raises TakesLong if so. The request is then prepared in a thread, from the start.

Several requests that arrive together are prepared one after another. Each may take up to 5 ms (24 kB of random
letters), a dozen 50 ms, so their total time is bounded as well: once it is used up, the remaining requests go to a
thread without being looked at, however short they are.
"""

from __future__ import annotations

import threading

# Total time for the prompts of one event-loop iteration before the rest of them go to threads. The longest single one
# comes on top: the loop is blocked for some 15 ms at worst (a 2-core cloud machine).
LOOP_SECONDS = 0.008


class TakesLong(Exception):
    """Raised where a prompt would block the event loop, and should be prepared in a thread."""


class _EventLoop(threading.local):
    """Whether the calling thread is the event loop, and until when it may prepare prompts itself."""

    holds = False  # this thread is the event loop, and it waits for the work
    until = 0.0  # when the time of the current prompts ends, by `perf_counter`


event_loop = _EventLoop()
