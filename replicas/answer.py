"""What came of one GET to an engine."""

import asyncio
from dataclasses import dataclass

import orjson

# Values in an answer's JSON. Reading it holds the interpreter, in a thread too: 0.2 us for each, at the most. Server
# arguments of SGLang for 128 ranks have 51,000.
MOST_VALUES = 1 << 16
_STRUCTURE = bytes({*range(256)} - {*b",[{"})  # all but what begins a value, or stands between two


def count_values(text: bytes) -> int:
    """Return an upper bound of the values in a JSON text, short of one."""
    return len(text.translate(None, _STRUCTURE))


@dataclass(slots=True)
class Answer:
    """One GET. `status` 0 means no answer came; then `fault` and `error` say why. `over`: the connection that
    it came over; `closes`: the server announced that it closes that one after this answer. `gateway`: a gateway gave
    it. `turns_away`: nobody listens any more, or it says itself that it takes nothing now. `most_values`: JSON
    of more is not read. `large`: it had more than 64 KiB, or a limit ended it."""

    status: int
    body: bytes = b""
    fault: str = ""
    error: str = ""
    over: asyncio.BaseTransport | None = None
    closes: bool = False
    gateway: bool = False
    turns_away: bool = False
    unreadable: str = ""  # why the body cannot be read as JSON, although it begins like JSON
    most_values: int = MOST_VALUES
    large: bool = False
    _parsed: dict | None = None

    def json(self) -> dict:
        """The body as an object; {} when it is anything else."""
        if self._parsed is None:
            value = None
            try:
                if count_values(self.body) > self.most_values:
                    self.unreadable = f"it has more than {self.most_values:,} values"
                else:
                    # `json` would take half of a surrogate pair, which breaks every page that has to show it.
                    value = orjson.loads(self.body)
            except orjson.JSONDecodeError as error:
                self.unreadable = error.msg
            self._parsed = value if isinstance(value, dict) else {}
        return self._parsed
