"""Stored responses (`/v1/responses`): only the engine that made one can tell it, cancel it, or go on from it.

Who made which is noted as answers pass. What is not known here, since it passed another worker or gateway or is long
ago, is found by asking: an engine without it answers 404 before it computes anything, and the next one is tried.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..http.messages import Request
from ..prompt.prompt import LONGEST_RESPONSE_ID
from .paths import STORED_RESPONSE

if TYPE_CHECKING:
    from .exchange import Attempt

PATH = "/v1/responses"
MOST = 10_000  # 5 MB
# The first id in an answer, whole or streamed, is the response's; those of its items begin with other letters.
_MADE = re.compile(rb'"id": ?"(resp_[^"\\]{1,%d})"' % (LONGEST_RESPONSE_ID - len("resp_")))


def referred_to(request: Request) -> str | None:
    """The stored response that a request's path names. Which one its body goes on from its prompt tells."""
    named = STORED_RESPONSE.fullmatch(request.path)
    return named[1] if named else None


class Responses:
    """Which replica made which, of the last MOST."""

    def __init__(self) -> None:
        self._makers: dict[str, str] = {}

    def maker(self, response: str | None) -> str | None:
        return self._makers.get(response) if response is not None else None

    def answered(self, attempt: Attempt, about: str | None, makes: bool, begin: bytes) -> None:
        """`begin`: the first bytes of its answer's body. `about`: the stored response that it is about; `makes`: it may
        make one."""
        if attempt.status != 200:
            return
        if about is not None:
            self._note(about, attempt.backend.id)
        if makes and (made := _MADE.search(begin)):
            self._note(made[1].decode("latin-1"), attempt.backend.id)

    def _note(self, response: str, replica: str) -> None:
        self._makers[response] = replica
        if len(self._makers) > MOST:
            del self._makers[next(iter(self._makers))]
