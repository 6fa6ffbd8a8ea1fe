"""What came of one GET to an engine."""

import json
from dataclasses import dataclass


@dataclass(slots=True)
class Answer:
    """One GET. `status` 0 means no answer came; then `fault` and `error` say why. `fresh`: it took a new connection;
    `closes`: the server announced that it closes that connection after this answer."""

    status: int
    body: bytes = b""
    fault: str = ""
    error: str = ""
    fresh: bool = False
    closes: bool = False

    def json(self) -> dict:
        """The body as an object; {} when it is anything else."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}
