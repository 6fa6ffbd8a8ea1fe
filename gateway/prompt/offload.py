"""What is too much work for the event loop.

Whether a request takes long cannot be told from the bytes of its body: 39 kB of a conversation that is known take 0.1
ms, 39 kB of one letter 9 ms, and 30 kB in 900 messages 90 ms in the one request whose shape is compiled. So whoever is
about to do such work asks whether the event loop waits for it, and raises TakesLong if it does. The request is prepared
in a thread then, from the start.

Several that come at once are prepared in one go. Each may take up to 5 ms (24 kB of random letters), a dozen 50 ms, so
the time they have together is bounded as well: whoever comes after it goes to a thread, however short it is, and is not
even read before.
"""

from __future__ import annotations

import threading

# How long prompts that come in one iteration of the event loop may take before the rest of them go to threads. The
# longest single one comes on top: the loop is held for some 15 ms at worst (a 2-core cloud machine).
LOOP_SECONDS = 0.008


class TakesLong(Exception):
    """A thread should prepare this prompt: it would hold up the event loop."""


class _EventLoop(threading.local):
    """What is true where it is asked: each thread has its own."""

    holds = False  # this is the event loop, and it waits
    until = 0.0  # when the prompts that are prepared now have had their time, by `perf_counter`


event_loop = _EventLoop()
