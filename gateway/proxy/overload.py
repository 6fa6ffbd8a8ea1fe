"""What overload control works with: classes of service, and the rules of the queue."""

from __future__ import annotations

from typing import NamedTuple

from policies import Classes, Rules


class Overload(NamedTuple):
    """`tenant_header`: the header of a request that names its tenant; None: all requests are of one."""

    classes: Classes
    rules: Rules
    tenant_header: bytes | None
