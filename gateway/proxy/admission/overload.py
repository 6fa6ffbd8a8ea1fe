"""The configuration of admission and overload control: the service classes, and the rules of the queue."""

from __future__ import annotations

from typing import NamedTuple

from policies import Classes, Rules


class Overload(NamedTuple):
    """The service classes, and the rules by which their requests are admitted, queued or refused.

    `tenant_header`: the request header with the tenant's name; None: the API key names the tenant.
    """

    classes: Classes
    rules: Rules
    tenant_header: bytes | None
