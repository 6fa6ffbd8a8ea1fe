"""The result of one HTTP GET to an engine."""

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson

# Limit of values in an answer's JSON. Parsing holds the interpreter lock, even in a thread, for up to 0.2 us per value.
# SGLang's server arguments for 128 ranks have 51,000.
MOST_VALUES = 1 << 16
_STRUCTURE = bytes({*range(256)} - {*b",[{"})  # all bytes but comma, [ and {, which precede a value


def count_values(text: bytes) -> int:
    """Return the number of commas and opening brackets in a JSON text; it has at most one value more than that."""
    return len(text.translate(None, _STRUCTURE))


@dataclass(slots=True)
class Answer:
    """The result of one HTTP GET."""

    status: int  # 0: no answer came
    body: bytes = b""
    fault: str = ""  # the kind of failure: connect, timeout, closed, 5xx, refused (no engine), own (the gateway's)
    error: str = ""  # description of the failure
    over: asyncio.BaseTransport | None = None  # the connection that the answer came over
    closes: bool = False  # the server announced that it closes the connection after this answer
    gateway: bool = False  # a gateway of this project answered, not an engine
    turns_away: bool = False  # the connection was refused, or the engine says that it takes no requests now
    unreadable: str = ""  # why the body cannot be read as JSON although it begins like JSON
    most_values: int = MOST_VALUES  # JSON with more values is not parsed
    large: bool = False  # the body has more than 64 KiB, or exceeded a limit
    _parsed: dict[str, Any] | None = None

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object; {} if it is not one."""
        if self._parsed is None:
            value = None
            try:
                if count_values(self.body) > self.most_values:
                    self.unreadable = f"it has more than {self.most_values:,} values"
                else:
                    # `json` would accept half of a surrogate pair, which breaks every page that shows it.
                    value = orjson.loads(self.body)
            except orjson.JSONDecodeError as error:
                self.unreadable = error.msg
            self._parsed = value if isinstance(value, dict) else {}
        return self._parsed
