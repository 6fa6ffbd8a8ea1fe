"""The requests to a simulated fleet and their records; times are seconds of the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Turn:
    """A request to the fleet."""

    hashes: list[int]  # chained hashes of the full blocks of its prompt
    tokens: int  # of the prompt
    output: int  # tokens of the reply
    all_hashes: list[int]  # chained hashes of the full blocks of prompt and reply together
    think: float = 0.0  # seconds between the previous reply and this request
    text: bool = False  # the prompt is text, which engines take longer to read where their profile says so
    max_tokens: int | None = None  # sent by the client, all that gateways know of `output`; None: not sent
    qos: str = ""  # name of its class, where requests are admitted by class
    tenant: str = ""


@dataclass(slots=True)
class Record:
    """The outcome of one request."""

    turn: Turn
    sent: float
    replica: int = -1  # the last one it was sent to; -1: none
    predicted: int = 0  # cached tokens that its gateway predicted
    expected_ttft: float = 0.0  # seconds, predicted by its gateway
    cached: int = 0  # prompt tokens that the engine found in its cache
    first: float = 0.0  # when the first token came; 0: none
    end: float = 0.0
    error: str | None = None  # named as `loadgen.drive.records` names it
    detail: str = ""
    retry_after: float = 0.0  # if it was refused: predicted seconds until there is capacity
    tried: tuple[int, ...] = ()  # replicas that were lost before they answered
    prefilled_by: int = -1  # the prefiller, in two legs; `cached` is then what the prefiller found
    gaps: list[float] = field(default_factory=list)  # seconds between tokens, where the fleet keeps them

    @property
    def tokens(self) -> int:
        return self.turn.tokens

    @property
    def output(self) -> int:
        return self.turn.output


@dataclass
class Result:
    """The records of a simulated run."""

    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0  # virtual time until the last request ended
