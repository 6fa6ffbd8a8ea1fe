"""What a simulated fleet is asked, and what became of it. Times are seconds of the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Turn:
    """One request: chained hashes of its prompt's full blocks, and of prompt and reply together."""

    hashes: list[int]
    tokens: int  # of the prompt
    output: int  # tokens of the reply
    all_hashes: list[int]
    think: float = 0.0  # seconds between the reply before and this request
    text: bool = False  # the prompt comes as text: an engine with a profile of that takes longer to read it
    max_tokens: int | None = None  # what the client sends as such, all that a gateway knows of `output`; None: nothing
    qos: str = ""  # its class's name, where requests are admitted by class
    tenant: str = ""


@dataclass(slots=True)
class Record:
    """What became of one request."""

    turn: Turn
    sent: float
    replica: int = -1  # the last one it was sent to; -1: none was there
    predicted: int = 0  # cached tokens that its gateway promised
    expected_ttft: float = 0.0  # by the chosen replica's costs
    cached: int = 0  # cached tokens the engine found
    first: float = 0.0
    end: float = 0.0
    error: str | None = None  # named as `loadgen.drive.records` names it
    detail: str = ""
    retry_after: float = 0.0  # seconds after which it is predicted to be taken, where it was refused for want of room
    tried: tuple[int, ...] = ()  # replicas that were lost before they answered
    prefilled_by: int = -1  # the replica that computed the prompt for another; `cached` is what that one found
    gaps: list[float] = field(default_factory=list)  # seconds between tokens, where the fleet keeps them

    @property
    def tokens(self) -> int:
        return self.turn.tokens

    @property
    def output(self) -> int:
        return self.turn.output


@dataclass
class Result:
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0  # virtual time until the last request ended
