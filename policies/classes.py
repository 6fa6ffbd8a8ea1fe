"""Classes of service: who goes first when there is not enough for all, and how a request's class is found.

Times are seconds. A class is chosen by the first rule whose conditions all hold; a rule without conditions always does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Slo(NamedTuple):
    """What a request is to be answered within; None: no limit."""

    ttft: float | None = None  # seconds to the first token
    tpot: float | None = None  # seconds from one token to the next, on average

    def over(self, other: Slo) -> Slo:
        """Return these limits, and the other's where there is none."""
        return Slo(other.ttft if self.ttft is None else self.ttft, other.tpot if self.tpot is None else self.tpot)

    def within(self, other: Slo) -> Slo:
        """Return the stricter of these limits and the other's."""
        return Slo(*[min((one for one in pair if one is not None), default=None) for pair in zip(self, other)])


NO_LIMITS = Slo()


@dataclass(frozen=True, slots=True)
class QosClass:
    """`reserved_fraction`: of the prefill seconds and KV cache that all classes were admitted lately, what the class
    gets before classes that have had theirs; who needs less leaves the rest to all. `priority`: the higher goes first
    among equals in that. `when_full` and `max_tokens_floor`: as of `Rules`, None for theirs."""

    name: str
    reserved_fraction: float = 0.0
    priority: int = 0
    slo: Slo = NO_LIMITS
    when_full: tuple[str, ...] | None = None
    max_tokens_floor: int | None = None


DEFAULT_CLASS = QosClass("default")


class Rule(NamedTuple):
    """Conditions, None where there is none. A `header` has a name and the value it must have (None: any); `model`,
    `path` and `key`, the name of the API key's tenant, may end with `*` for all that begin so."""

    qos: QosClass
    header: tuple[str, str | None] | None = None
    model: str | None = None
    path: str | None = None
    key: str | None = None


class Classes:
    """All classes, and the rules that say whose a request is. Where none holds it is of the lowest priority."""

    def __init__(self, classes: Sequence[QosClass] = (DEFAULT_CLASS,), rules: Sequence[Rule] = ()) -> None:
        self.all = tuple(classes)
        self._rules = tuple(rules)
        self._named = {one.name: one for one in classes}
        self.last = min(classes, key=lambda one: one.priority)

    def unreached(self, named: Collection[str | None], keys: bool) -> tuple[QosClass, ...]:
        """Return the classes that no request is of. `named`: those that keys have; `keys`: whether clients bring any,
        without which a rule that asks for one never holds."""
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
        """Return a request's class. `header`: the value of its header by this name; `key`: the name that its API key
        stands for; `named`: the class that the key itself has, which goes before all rules."""
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
    if wanted is None or value is None:
        return wanted is None
    return value.startswith(wanted[:-1]) if wanted.endswith("*") else value == wanted
