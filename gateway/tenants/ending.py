"""What a request has cost when it ends, whichever way."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..prompt.prompt import NO_PREFILL
from .metering import Metering

if TYPE_CHECKING:
    from ..proxy.answers import Usage
    from ..proxy.exchange import Exchange


class Cost(NamedTuple):
    """In tokens; `cached` of `input`."""

    input: int
    cached: int
    output: int


NOTHING = Cost(0, 0, 0)


def cost(exchange: Exchange, usage: Usage | None) -> Cost:
    """What an engine was made to do: as it told, else the prompt's own tokens and the events of its stream. A request
    that was answered with an error costs nothing, one whose client left or whose stream broke what it had by then."""
    attempt, prompt = exchange.attempt, exchange.prompt
    if attempt is None or not attempt.sent_at or exchange.status:
        return NOTHING
    if attempt.status >= 400 or (attempt.fault and attempt.pieces <= 1):
        return NOTHING
    told_input, told_output, cached = usage if usage is not None else (None, None, None)
    known = prompt.tokens if prompt is not None and prompt.path not in NO_PREFILL else 0
    produced = attempt.pieces if attempt.streams else 0
    return Cost(
        known if told_input is None else told_input, cached or 0, produced if told_output is None else told_output
    )


class Settled:
    """An `on_end`: takes what a request has claimed for what it has cost."""

    def __init__(self, metering: Metering):
        self._metering = metering

    def __call__(self, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
        if exchange.charge is not None:
            found = cost(exchange, usage)
            self._metering.settle(exchange.charge, found.input, found.output)
