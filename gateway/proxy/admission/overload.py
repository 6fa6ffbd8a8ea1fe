"""The configuration of overload control: classes of service, and the rules of the queue."""

from __future__ import annotations

from typing import NamedTuple

from policies import Classes, Rules


class Overload(NamedTuple):
    """The configuration. `tenant_header`: the request header with the tenant's name; None: the API key names it."""

    classes: Classes
    rules: Rules
    tenant_header: bytes | None
