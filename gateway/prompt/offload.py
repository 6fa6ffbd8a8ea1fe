"""Protection of the event loop from prompts that take long to render and tokenize.

A body's size does not determine its time. A body of 39 kB takes 0.1 ms if the conversation was seen before, and 9 ms if
it is one letter repeated. A body of 30 kB in 900 messages takes 90 ms in the one request for which its template is
compiled (`render.compiler`). So code that is about to do long work checks whether it runs on the event loop, and raises
TakesLong if it does. The request is then prepared again from the start, in a thread.

Requests that arrive together are prepared one after another. Each may take up to 5 ms (24 kB of random letters), and a
dozen of them 50 ms, so their total time is bounded as well. Once it is used up, the remaining requests go to a thread
without being looked at, however short they are.
"""

from __future__ import annotations

import threading

# Seconds that the prompts of one event-loop iteration may take together before the rest of them go to threads. The last
# prompt may exceed this, so the loop is blocked for some 15 ms at worst (a 2-core cloud machine).
LOOP_SECONDS = 0.008


class TakesLong(Exception):
    """Raised on the event loop for a prompt that would block it too long; prepare the request in a thread instead."""


class _EventLoop(threading.local):
    """Thread-local flags: whether this thread is the event loop, and until when it may prepare prompts itself."""

    holds = False  # this thread is the event loop, which is blocked while the prompt is prepared
    until = 0.0  # when the time for the prompts of this event-loop iteration ends, by `perf_counter`


event_loop = _EventLoop()
