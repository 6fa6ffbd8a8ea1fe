"""Classes of service: who is served first when capacity is short, and how a request is assigned to a class.

Times are seconds. The first rule whose conditions all hold decides; a rule without conditions always holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Slo(NamedTuple):
    """The latency limits of a request (its service level objective); None means no limit."""

    ttft: float | None = None  # seconds to the first token
    tpot: float | None = None  # seconds from one token to the next, on average

    def over(self, other: Slo) -> Slo:
        """Return these limits, with missing ones filled in from `other`."""
        return Slo(other.ttft if self.ttft is None else self.ttft, other.tpot if self.tpot is None else self.tpot)

    def within(self, other: Slo) -> Slo:
        """Return for TTFT and for TPOT each the stricter limit of this and the other; None where neither has one."""
        return Slo(*[min((one for one in pair if one is not None), default=None) for pair in zip(self, other)])


NO_LIMITS = Slo()


@dataclass(frozen=True, slots=True)
class QosClass:
    """A class of service: its share of capacity, its priority and its latency limits."""

    name: str
    # The share of the recently admitted prefill seconds and KV cache that the class gets before any class that has had
    # its own share. All classes may use what it does not use.
    reserved_fraction: float = 0.0
    priority: int = 0  # the higher goes first among classes that have had their share, and among those that have not
    slo: Slo = NO_LIMITS
    when_full: tuple[str, ...] | None = None  # steps for a request that finds no room; None: those of `Rules`
    max_tokens_floor: int | None = None  # tokens at which answers are capped; None: that of `Rules`


DEFAULT_CLASS = QosClass("default")


class Rule(NamedTuple):
    """A rule that assigns requests to the class `qos` if all of its conditions hold; None means no condition."""

    qos: QosClass
    header: tuple[str, str | None] | None = None  # a name, and the value that the header must have (None: any value)
    # These three match exactly, or as a prefix if they end with `*`.
    model: str | None = None
    path: str | None = None
    key: str | None = None  # the tenant's name of the API key


class Classes:
    """All classes, and the rules that assign requests to them.

    A request that no rule matches is of the class of the lowest priority, `last`.
    """

    def __init__(self, classes: Sequence[QosClass] = (DEFAULT_CLASS,), rules: Sequence[Rule] = ()) -> None:
        self.all = tuple(classes)
        self._rules = tuple(rules)
        self._named = {one.name: one for one in classes}
        self.last = min(classes, key=lambda one: one.priority)

    def unreached(self, named: Collection[str | None], keys: bool) -> tuple[QosClass, ...]:
        """Return the classes to which no request can be assigned, so that operators can be warned.

        `named`: the classes that API keys name; `keys`: whether clients send API keys at all (without them, a rule with
        a `key` condition never holds).
        """
        rules = [rule for rule in self._rules if keys or rule.key is None]
        reached = {*named, *(rule.qos.name for rule in rules)}
        if all(any(condition is not None for condition in rule[1:]) for rule in rules):
            reached.add(self.last.name)
        return tuple(one for one in self.all if one.name not in reached)

    def of(
        self,
        header: Callable[[bytes], str | None],
        path: str,
        model: str,
        key: str | None = None,
        named: str | None = None,
    ) -> QosClass:
        """Return the class of a request.

        `header`: a function that returns the request's value of the header with a given name, None if it has no such
        header. `path`, `model`: the API path and the model that the request names.
        `key`: the name of the tenant to whom the request's API key belongs. `named`: the class that is set for the API
        key itself, which takes precedence over all rules.
        """
        if named is not None and (own := self._named.get(named)) is not None:
            return own
        for rule in self._rules:
            if rule.header is not None:
                name, wanted = rule.header
                value = header(name.encode("latin-1"))
                if value is None or (wanted is not None and value.strip() != wanted):
                    continue
            if _fits(rule.path, path) and _fits(rule.model, model) and _fits(rule.key, key):
                return rule.qos
        return self.last


def _fits(wanted: str | None, value: str | None) -> bool:
    """Return whether a value matches a condition: exactly, or as a prefix if the condition ends with `*`."""
    if wanted is None or value is None:
        return wanted is None
    return value.startswith(wanted[:-1]) if wanted.endswith("*") else value == wanted
