"""The request that is sent to a replica: the client's, with what the hooks of the phase `before_send` write into it.

`Proxy` lists the hooks in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .exchange import Attempt, Exchange


@dataclass(slots=True)
class Outgoing:
    """A request on its way to a replica, which hooks change before it is sent.

    `body`: the body, at first the client's or the attempt's own.
    `lines`: header lines that the gateway adds, each with its line end.
    `left_out`: names of client headers, in lower case, that are not forwarded.
    """

    body: bytes
    lines: bytes
    left_out: frozenset[bytes]


BeforeSend = Callable[["Exchange", "Attempt", Outgoing], None]  # a hook of the phase `before_send`
