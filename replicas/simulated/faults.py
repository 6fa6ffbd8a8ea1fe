"""Injected faults: POST /faults makes the simulated engine fail as real engines do, to test gateways and clients."""

import random
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

Count = Annotated[int, Field(ge=0)]


class Faults(BaseModel):
    """The faults that are still to happen. A count is lowered by one each time its fault happens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    slow: Annotated[float, Field(gt=0)] = 1.0  # every step takes so many times as long, until it is 1 again
    error_503: Count = 0  # requests to be answered 503, as by an engine whose queue is full
    error_500: Count = 0
    error_stream: Count = 0  # streams to be answered 200 with an error event and no token
    error_mid_stream: Count = 0  # streams to have an error event after their second token
    error_share: Annotated[float, Field(ge=0, le=1)] = 0.0  # of requests: streams as with error_stream, others get 500
    refuse: Count = 0  # requests to be cut off without an answer
    die_mid_stream: Count = 0  # streams to be cut off after their second token
    drop_events: Count = 0  # event batches that are not sent; they can be replayed
    reorder_events: Count = 0  # event batches to be sent after the one that follows
    _dice: random.Random = PrivateAttr(default_factory=lambda: random.Random(0))

    def happens(self, name: str) -> bool:
        """Return whether the fault of this name is due now; if so, lower its count."""
        if due := getattr(self, name) > 0:
            setattr(self, name, getattr(self, name) - 1)
        return due

    def strikes(self) -> bool:
        """Return whether this request belongs to the random share that fails (`error_share`)."""
        return self.error_share > 0 and self._dice.random() < self.error_share
