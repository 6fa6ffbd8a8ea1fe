"""What came of one GET to an engine."""

import asyncio
import json
from dataclasses import dataclass


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
    deep: bool = False  # it is JSON that nests deeper than any answer
    _parsed: dict | None = None

    def json(self) -> dict:
        """The body as an object; {} when it is anything else."""
        if self._parsed is None:
            try:
                value = json.loads(self.body)
            except RecursionError:
                value, self.deep = {}, True
            except ValueError:
                value = {}
            self._parsed = value if isinstance(value, dict) else {}
        return self._parsed
