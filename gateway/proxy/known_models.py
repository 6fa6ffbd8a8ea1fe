"""The models and adapters that replicas told, those of replicas that are away among them, and what is said of one that
nobody serves now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from replicas import State
from replicas.served import may_serve

from ..errors import ApiError

if TYPE_CHECKING:
    from replicas import Replica

    from ..tenants.tenant import Tenant
    from .backend import Backend

# Of the 503 for a model that no replica is known to serve, while some have not told theirs.
MODEL_NOT_KNOWN = "model_not_known"
EXPECTED_SECONDS = 600.0  # that a model is waited for after a pod of it went: the next one is found a place first
MOST_LEFT = 4096  # names of these that are kept
TAKEN_OUT = (State.DRAINING, State.STOPPED)  # by an operator, or with its pod
UNTOLD = (State.STARTING, State.WARMING, State.FAILED)  # in these a replica is expected to tell its models by itself


class KnownModels:
    """`replicas`: all that are known. `backends` are those that were ready once."""

    def __init__(self, backends: Mapping[str, Backend], replicas: Mapping[str, Replica]):
        self._backends, self._replicas = backends, replicas
        self.unlisted: Callable[[], str] = lambda: ""  # why `replicas` may lack some that there are; "": it lacks none
        self._now: Collection[str] = ()  # the names that are served
        self._served: dict[str, frozenset[str]] = {}  # by replica: the names it told last, also while it is away
        self._left: dict[str, float] = {}  # names of which pods went, and when, the latest last
        self._unserved: set[str] = set()  # of these, those that no replica has served since

    def changed(self, now: Collection[str]) -> None:
        """These names are served `now`."""
        self._now = now
        self._unserved.difference_update(now)
        told = {id: frozenset(backend.replica.models) for id, backend in self._backends.items()}
        before = {id: names for id, names in self._served.items() if id in self._replicas}
        self._served = before | {id: names or self.of(id) for id, names in told.items()}

    def of(self, replica: str) -> frozenset[str]:
        """The names that it told last, also while it is away."""
        return self._served.get(replica, frozenset())

    # --- pods that went

    def expect_back(self, replicas: Iterable[Replica]) -> None:
        """The pods of these replicas go, and most likely others come in their place."""
        now = monotonic()
        names = {name for one in replicas for name in (*self._told(one), one.required_model) if name}
        left = [*((name, at) for name, at in self._left.items() if name not in names), *((name, now) for name in names)]
        self._left = dict(left[-MOST_LEFT:])
        self._unserved = (self._unserved | names) & {*self._left}

    def gone(self) -> dict[str, float]:
        """The names whose pods are expected back, and for how many seconds they have been gone, the longest first."""
        return self._gone(())

    def _gone(self, unserved: Collection[str]) -> dict[str, float]:
        """These are in it however long that is."""
        now = monotonic()
        return {name: now - at for name, at in self._left.items() if now - at < EXPECTED_SECONDS or name in unserved}

    def missing(self) -> list[str]:
        """The names whose last replica went with its pod, and that none has served since. Not those of a replica that
        is only away, and none that an operator removed: who did that knows."""
        return sorted(name for name in self._unserved if name not in self._now and not self._has_served(name))

    # --- a worker in another one's place

    def handed_on(self) -> dict[str, Any]:
        """What it goes on with: by replica the names that it served last, and what `wait_for_gone` takes."""
        return {
            "served": {id: sorted(names) for id, names in self._served.items() if names},
            "gone": self._gone(self._unserved),
            "unserved": sorted(self._unserved),
        }

    def wait_for_gone(self, gone: Mapping[str, float], unserved: Iterable[str]) -> None:
        """Wait for pods that went before this process began, as `handed_on` tells."""
        now = monotonic()
        self._left = {name: now - seconds for name, seconds in gone.items()} | self._left
        self._unserved.update(name for name in unserved if name in self._left)

    def served_before(self, replica: str, names: Iterable[str]) -> None:
        """A replica served these names before this process began."""
        self._served.setdefault(replica, frozenset(names))

    # --- a model that nobody serves now

    def is_away(self, model: str) -> bool:
        """Whether a replica that is not ready served it before, or has to serve it, or a pod of it went lately. A drain
        is a step of an upgrade where the replica has served; where it never has, nobody waits for it."""
        return (
            self._has_served(model)
            or any(one.required_model == model and one.state not in TAKEN_OUT for one in self._replicas.values())
            or self._is_expected_back(model)
        )

    def error(self, model: str | None, tenant: Tenant | None) -> ApiError:
        """Why nobody serves this model: it is not served here, no replica of it is ready, or one that is not ready may
        serve it. A tenant is told of no models but those that it may use."""
        known = self._now
        if model is not None and known and model not in known and not self.is_away(model):
            untold = [_described(one) for one in self._replicas.values() if self._is_untold(one)]
            if unlisted := self.unlisted():
                untold.append(unlisted)
            told = known if tenant is None else [name for name in known if tenant.may_use(name)]
            return unknown_model_error(model, told, untold)
        states = [_described(one) for one in self._replicas.values() if self._may_serve(one, model)]
        if model is not None and self._is_expected_back(model):
            states.append(f"a pod of it went {monotonic() - self._left[model]:.0f} s ago")
        what = f"no replica{'' if model is None else f' of {model[:200]!r}'} is ready"
        return ApiError(503, f"{what} ({'; '.join(states) or 'none is known'})", discreet=what)

    def _has_served(self, model: str) -> bool:
        """Whether a replica that is known told this name last."""
        return any(model in names for id, names in self._served.items() if id in self._backends or id in self._replicas)

    def _is_expected_back(self, model: str) -> bool:
        return monotonic() - self._left.get(model, -inf) < EXPECTED_SECONDS

    def _is_untold(self, replica: Replica) -> bool:
        """Whether it is expected to tell its models, and has not yet."""
        return replica.state in UNTOLD and not self._told(replica)

    def _told(self, replica: Replica) -> Collection[str]:
        """The names that it has told, now or before it went away."""
        return replica.models or self.of(replica.id)

    def _may_serve(self, replica: Replica, model: str | None) -> bool:
        """Whether it serves that model once it is ready, as far as is known."""
        return model is None or may_serve(model, self._told(replica), replica.required_model)


def unknown_model_error(model: str, known: Collection[str], untold: Sequence[str]) -> ApiError:
    """Refuse a model that no replica is known to serve. A 404 is final to clients, so none is given while replicas may
    serve it that have not told their models. `untold`: these, in words."""
    served = f"served here: {', '.join(sorted(known)) or 'none'}"
    if untold:
        what = f"no replica is known to serve {model[:200]!r} ({served})"
        return ApiError(
            503,
            f"{what}, but these have not told their models yet: {'; '.join(untold)}",
            code=MODEL_NOT_KNOWN,
            discreet=f"{what}, but some replicas have not told their models yet",
        )
    return ApiError(
        404,
        f"the model {model[:200]!r} does not exist; {served}",
        param="model",
        code="model_not_found",
    )


def _described(replica: Replica) -> str:
    return f"{replica.id} is {replica.state}: {replica.reason}"
