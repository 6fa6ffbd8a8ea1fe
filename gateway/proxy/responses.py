"""Stored responses (`/v1/responses`): only the engine that made one can tell it, cancel it, or go on from it.

Who made which is noted as answers pass. What is not known here, since it passed another worker or gateway or is long
ago, is found by asking: an engine without it answers 404 before it computes anything, and the next one is tried.
"""

from __future__ import annotations

import re

from ..http.messages import Request
from ..prompt.prompt import LONGEST_RESPONSE_ID
from .paths import STORED_RESPONSE

PATH = "/v1/responses"
MOST = 10_000  # 5 MB
# The first id in an answer, whole or streamed, is the response's. A client of vLLM may name it (`request_id`), and then
# it need not begin with `resp_`. One of other letters is none that a path can name.
_MADE = re.compile(rb'"id": ?"(?:([\w.:-]{1,%d})")?' % LONGEST_RESPONSE_ID)


def referred_to(request: Request) -> str | None:
    """The stored response that a request's path names. Which one its body goes on from its prompt tells."""
    named = STORED_RESPONSE.fullmatch(request.path)
    return named[1] if named else None


class Stored:
    """A stored response, as one request made it. `replica`: the one that has it. `counted`: the tokens of its prompt
    and its text that a tenant has been charged for, by whichever request told of them."""

    __slots__ = ("replica", "counted")

    def __init__(self, replica: str):
        self.replica = replica
        self.counted = (0, 0, 0)  # as in `tenants.ending.Cost`


class Responses:
    """The MOST stored responses that were asked for last."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}

    def maker(self, response: str | None) -> str | None:
        stored = self._stored.get(response) if response is not None else None
        return stored.replica if stored is not None else None

    def answered(self, replica: str, about: str | None, makes: bool, begin: bytes) -> Stored | None:
        """Return the stored response that an answer of status 200 makes or tells. `begin`: the first bytes of its body;
        `about`: the one that it is about; `makes`: it may make one, which is new whatever has had its id before."""
        told = self._note(about, replica) if about is not None else None
        if not makes:
            return told
        made = _MADE.search(begin)
        if made is None or made[1] is None:
            return None
        id = made[1].decode("latin-1")
        self._stored.pop(id, None)
        return self._note(id, replica)

    def _note(self, response: str, replica: str) -> Stored:
        stored = self._stored.pop(response, None) or Stored(replica)
        self._stored[response] = stored  # behind all others, since it is asked for
        if len(self._stored) > MOST:
            del self._stored[next(iter(self._stored))]
        stored.replica = replica
        return stored
