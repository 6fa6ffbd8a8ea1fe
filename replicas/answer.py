"""What came of one GET to an engine."""

import asyncio
import json
from dataclasses import dataclass


@dataclass(slots=True)
class Answer:
    """One GET. `status` 0 means no answer came; then `fault` and `error` say why. `over`: the connection that
    it came over; `closes`: the server announced that it closes that one after this answer. `gateway`: a gateway gave
    it."""

    status: int
    body: bytes = b""
    fault: str = ""
    error: str = ""
    over: asyncio.BaseTransport | None = None
    closes: bool = False
    gateway: bool = False

    def json(self) -> dict:
        """The body as an object; {} when it is anything else."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}
