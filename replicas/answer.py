"""What came of one GET to an engine."""

import asyncio
from dataclasses import dataclass

import orjson


@dataclass(slots=True)
class Answer:
    """One GET. `status` 0 means no answer came; then `fault` and `error` say why. `over`: the connection that
    it came over; `closes`: the server announced that it closes that one after this answer. `gateway`: a gateway gave
    it. `turns_away`: nobody listens any more, or it says itself that it takes nothing now."""

    status: int
    body: bytes = b""
    fault: str = ""
    error: str = ""
    over: asyncio.BaseTransport | None = None
    closes: bool = False
    gateway: bool = False
    turns_away: bool = False
    unreadable: str = ""  # why the body, which begins as JSON does, is none
    _parsed: dict | None = None

    def json(self) -> dict:
        """The body as an object; {} when it is anything else."""
        if self._parsed is None:
            try:
                # `json` would take half of a surrogate pair, which breaks every page that has to show it.
                value = orjson.loads(self.body)
            except orjson.JSONDecodeError as error:
                value, self.unreadable = {}, error.msg
            self._parsed = value if isinstance(value, dict) else {}
        return self._parsed
