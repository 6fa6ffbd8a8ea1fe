"""The tables `slo`, `scheduler`, `request_router` and `admission`: limits, classes, routes and the queue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from replicas import yaml_text
from replicas.tables import Table

from ..durations import parse_seconds, show_seconds, split_limits
from .fields import Bytes, Name

Step = Literal["wait", "degrade", "spill", "reject", "observe"]
STEPS = get_args(Step)  # as `policies.decisions.STEPS`
_STEPS = f"one or more of {', '.join(STEPS)}"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")


def read_mapping(value: Any) -> Any:
    """Return the table that a flag or a variable gives as one line of YAML, or a value that is no text unchanged."""
    return yaml_text.load(value) if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    """Return admission steps as a list: a single step becomes a list of one. Raises ValueError if there is no value.

    Steps say what is tried for a request that finds no room.
    """
    if value is None or value == "":
        raise ValueError(f"it has no value; write {_STEPS}")
    return value if isinstance(value, list | tuple) else [value]


def _has_entries(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    if not entries:  # `min_length` would count only the valid entries
        raise ValueError("it must be a list with one entry or more, each on a line that begins with a dash")
    return entries


def _check_steps(steps: tuple[str, ...]) -> tuple[str, ...]:
    if not steps:
        raise ValueError(f"it has no step; write {_STEPS}")
    if twice := [step for step in steps if steps.count(step) > 1]:
        raise ValueError(f"{twice[0]} is there twice; name each step once, in the order in which they are tried")
    if "observe" in steps and len(steps) > 1:
        raise ValueError("observe sends every request, so no step beside it is ever tried; write it alone")
    if "reject" in steps[:-1]:
        raise ValueError("reject refuses every request, so no step after it is ever tried; put it last")
    return steps


def _parse_window(value: Any) -> float | None:
    """Return the length of a control window in seconds, or None for `never`. Raises ValueError.

    The control window is the interval of overload control's decisions.
    """
    if value == "never":
        return None
    try:
        seconds = parse_seconds(value)
    except ValueError as error:
        raise ValueError(f"{error}; or never, for no control") from None
    if not 1.0 <= seconds <= 60.0:
        raise ValueError(f"{value!r} is out of range; write a time from 1s to 60s, or never")
    return seconds


def _split_header(value: Any) -> Any:
    """Return a condition on a header, like `X-Tier: gold` or `X-Tier`, with the header's name in lower case."""
    if not isinstance(value, str) or not value:
        return value
    name, colon, wanted = value.partition(":")
    name = check_header(name.strip())
    return f"{name}: {wanted.strip()}" if colon else name


def check_header(name: str) -> str:
    """Return a header's name in lower case. Raises ValueError."""
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{name[:100]!r} is not a header; write its name, and for a condition a colon and the value")
    return name.lower()


Duration = Annotated[float, BeforeValidator(parse_seconds), PlainSerializer(show_seconds)]
Window = Annotated[
    float | None, BeforeValidator(_parse_window), PlainSerializer(lambda one: show_seconds(one) if one else "never")
]
Count = Annotated[int, Field(ge=1, strict=True)]
Steps = Annotated[tuple[Step, ...], BeforeValidator(_as_list), AfterValidator(_check_steps)]


class Slo(Table):
    """Limits on the latency of requests; None: no limit.

    `ttft`: the time to first token in seconds; `tpot`: the time per output token in seconds.
    """

    ttft: Duration | None = None
    tpot: Duration | None = None

    @model_validator(mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        return split_limits(given) if isinstance(given, str) and given else given

    @model_validator(mode="after")
    def _has_one(self) -> Slo:
        if self.ttft is self.tpot is None:
            raise ValueError("it has no limit; write {ttft: 2s}, {tpot: 50ms} or both")
        return self


class QosClass(Table):
    """One class of service, to which routes and API keys assign requests.

    Where `when_full` or `max_tokens_floor` is None, the value of `Admission` applies.
    """

    name: Name
    # Of the recently admitted prefill seconds and KV cache: what the class gets before any that has had its own share.
    reserved_fraction: float = Field(0.0, ge=0.0, le=1.0, strict=True)
    priority: int = Field(0, ge=-1_000_000, le=1_000_000, strict=True)  # the higher first, among classes equal in that
    slo: Slo | None = None
    when_full: Steps | None = Field(None, description=_STEPS)
    max_tokens_floor: Count | None = None
    may_be_empty = frozenset(("slo",))


class Scheduler(Table):
    """The classes of service."""

    qos_classes: Annotated[tuple[QosClass, ...], AfterValidator(_has_entries)]

    @model_validator(mode="after")
    def _fit_together(self) -> Scheduler:
        names = self.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"qos_classes: {twice[0]!r} is there twice; give each class a name of its own")
        if (total := sum(one.reserved_fraction for one in self.qos_classes)) > 1.0 + 1e-9:
            raise ValueError(
                f"qos_classes: the reserved fractions add up to {total:g}, and a fleet has 1 to give; make them smaller"
            )
        return self

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.qos_classes]


class Match(Table):
    """The conditions of a route, all of which must hold; None: no condition."""

    header: Annotated[str, BeforeValidator(_split_header)] | None = None  # `name`, or `name: value`
    model: str | None = None  # a prefix if it ends with *, and so are `path` and `key`
    path: str | None = None
    key: str | None = None  # the tenant's name


class Route(Table):
    """One rule that gives requests a class of service if they meet some conditions."""

    match: Annotated[Match, BeforeValidator(lambda given: {} if given in (None, "") else given)] = Match()
    # "": none, which `Router.unfit` reports along with the known classes
    qos: Annotated[str, BeforeValidator(lambda given: given or "")] = Field("", alias="class")
    may_be_empty = frozenset(("match", "class"))

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, given: Any) -> Any:
        """Rename the field `qos` to `class`, because files of other schedulers call it `qos`."""
        if isinstance(given, Mapping) and "qos" in given and "class" not in given:
            return {"class" if name == "qos" else name: value for name, value in given.items()}
        return given


class Router(Table):
    """The rules (routes) that give requests a class of service; the first one that matches decides."""

    routes: Annotated[tuple[Route, ...], AfterValidator(_has_entries)]

    @model_validator(mode="after")
    def _leave_all_used(self) -> Router:
        for index, route in enumerate(self.routes[:-1]):
            if route.match == Match():
                raise ValueError(f"routes[{index}]: it has no condition, so no rule after it is ever used; put it last")
        return self

    def unfit(self, classes: Sequence[str]) -> str:
        """Return what is wrong with the classes of service that the routes name, or "".

        `classes`: the names of the configured classes.
        """
        if not classes:
            return "its routes lead to classes, and there are none; name them under scheduler.qos_classes"
        for index, route in enumerate(self.routes):
            if route.qos not in classes:
                why = f"there is no class {route.qos[:100]!r}" if route.qos else "it has no value"
                return f"routes[{index}].class: {why}; name one of scheduler.qos_classes: {', '.join(classes)}"
        return ""


class Admission(Table):
    """The handling of requests while all replicas are full; times in seconds."""

    when_full: Steps = Field(("wait",), description=_STEPS)  # tried in order for a request that finds no room
    max_tokens_floor: Count = 128  # the most tokens of an answer that the step `degrade` shortens
    engine_wait: Duration = 0.1  # the most work ahead in an engine for which its replica still has room
    max_wait: Duration = 30.0  # the longest time in the gateway's queue for a request without a limit on TTFT
    max_requests: Count = 10_000  # in that queue
    max_bytes: Bytes = 256 * 2**20  # of the requests in that queue
    # The header that names a request's tenant; None: the API key does.
    tenant_header: Annotated[str, AfterValidator(check_header)] | None = Field(None, description="the header's name")
    control_window: Window = 30.0  # the interval of overload control's decisions; None: there is no such control

    def of_one_worker(self, count: int) -> Admission:
        """Return these settings for one of `count` workers.

        Each worker has a queue of its own, so the bounds of the queue are divided by the number of workers.
        """
        divided = {"max_requests": self.max_requests // count or 1, "max_bytes": self.max_bytes // count or 1}
        return self.model_copy(update=divided)
