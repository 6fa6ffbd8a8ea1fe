"""What is too much work for the event loop.

Whether a request takes long cannot be told from the bytes of its body: 39 kB of a conversation that is known take 0.1 ms,
39 kB of one letter 9 ms, and 30 kB in 900 messages 90 ms in the one request whose shape is compiled. So whoever is about to
do such work asks whether the event loop waits for it, and raises TakesLong if it does. The request is prepared in a thread
then, from the start.
"""
from __future__ import annotations

import threading


class TakesLong(Exception):
    """A thread should prepare this prompt: it would hold up the event loop."""


class _EventLoop(threading.local):
    """`with event_loop:` stands around what must not take long; each thread has its own."""

    holds = False

    def __enter__(self) -> None:
        self.holds = True

    def __exit__(self, *_: object) -> None:
        self.holds = False


event_loop = _EventLoop()
