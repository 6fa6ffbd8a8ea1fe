"""The requests to a simulated fleet and their records; times are seconds of the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Turn:
    """A request to the fleet: one turn of a conversation."""

    hashes: list[int]  # chained hashes of the full KV blocks of its prompt
    tokens: int  # of the prompt
    output: int  # tokens of the reply
    all_hashes: list[int]  # chained hashes of the full KV blocks of prompt and reply together
    think: float = 0.0  # seconds between the previous reply and this request
    text: bool = False  # the prompt is text, not token ids; reading it takes an engine the time that its profile states
    max_tokens: int | None = None  # as the client sends it: all that gateways know of `output`; None: not sent
    qos: str = ""  # name of its QoS class, where requests are admitted by class
    tenant: str = ""


@dataclass(slots=True)
class Record:
    """The outcome of one request, which is filled in while the request proceeds."""

    turn: Turn
    sent: float
    replica: int = -1  # index of the last replica it was sent to; -1: none
    predicted: int = 0  # cached prompt tokens, as its gateway predicted
    expected_ttft: float = 0.0  # seconds, as its gateway predicted
    cached: int = 0  # prompt tokens that the engine found in its cache
    first: float = 0.0  # when the first token came; 0: none
    end: float = 0.0
    error: str | None = None  # class of failure, named as in `loadgen.drive.records`; None: answered
    detail: str = ""  # the failure in words
    retry_after: float = 0.0  # if it was refused: predicted seconds until there is capacity
    tried: tuple[int, ...] = ()  # replicas that were lost before they answered
    prefilled_by: int = -1  # in two legs: the replica that computed the prompt and found `cached` tokens; -1: one leg
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
