"""Stored responses (`/v1/responses`): which replica has each, since only its engine can return, cancel or continue it.

The engine that makes a response is noted when its answer is relayed. It is not known here if the answer went through
another worker or gateway, or was long ago. Then it is found by trying one engine after the other: an engine without the
response answers 404 before it computes anything.
"""

from __future__ import annotations

import re

from ...http.messages import Request
from ...prompt.prompt import LONGEST_RESPONSE_ID
from ..paths import STORED_RESPONSE

PATH = "/v1/responses"
MOST = 10_000  # stored responses that are remembered, in 5 MB
# The first id in an answer, streamed or not, is the response's. A client of vLLM may choose it (`request_id`), so it
# need not begin with `resp_`. An id with characters other than these cannot be in a path, and is not remembered.
_MADE = re.compile(rb'"id": ?"(?:([\w.:-]{1,%d})")?' % LONGEST_RESPONSE_ID)


def referred_to(request: Request) -> str | None:
    """Return the id of the stored response that a request's path names, or None.

    A request that names one in its body gets the id from its prompt later.
    """
    named = STORED_RESPONSE.fullmatch(request.path)
    return named[1] if named else None


class Stored:
    """A response that an engine has stored.

    `replica`: the id of the replica that has it.
    `counted`: the tokens (input, cached, output) of this response that its tenant was charged for so far.
    """

    __slots__ = ("replica", "counted")

    def __init__(self, replica: str):
        self.replica = replica
        self.counted = (0, 0, 0)


class Responses:
    """The stored responses that were made or requested last, at most 10,000 (`MOST`)."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}

    def maker(self, response: str | None) -> str | None:
        """Return the id of the replica that has a stored response, or None if that is not known."""
        stored = self._stored.get(response) if response is not None else None
        return stored.replica if stored is not None else None

    def answered(self, replica: str, about: str | None, makes: bool, begin: bytes) -> Stored | None:
        """Note which replica has the stored response that an answer with status 200 creates or returns.

        Returns this stored response, or None if the answer is about none.

        `about`: the id of the stored response that the request refers to, or None.
        `makes`: whether the answer may create a response, which replaces a known one with the same id.
        `begin`: the first bytes of the answer's body.
        """
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
        self._stored[response] = stored  # last in the order, as the most recently requested
        if len(self._stored) > MOST:
            del self._stored[next(iter(self._stored))]
        stored.replica = replica
        return stored
