"""The models and adapters that replicas reported, also those of replicas that are away and of pods that went, and the
error for one that no replica serves now."""

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
MOST_NAMES = 4096  # of pods that went: the latest are kept
TAKEN_OUT = (State.DRAINING, State.STOPPED)  # by an operator, or with its pod
UNTOLD = (State.STARTING, State.WARMING, State.FAILED)  # in these a replica is expected to tell its models by itself


class KnownModels:
    """`replicas`: all that are known. `backends` are those that were ready once."""

    def __init__(self, backends: Mapping[str, Backend], replicas: Mapping[str, Replica]):
        self._backends, self._replicas = backends, replicas
        self.unlisted: Callable[[], str] = lambda: ""  # why `replicas` may lack some that there are; "": it lacks none
        self._now: Collection[str] = ()  # the names that are served
        self._served: dict[str, frozenset[str]] = {}  # by replica: the names it reported last, also while it is away
        self._pod_went: dict[str, float] = {}  # by name: when a pod of it went last, the latest last
        self._gone: set[str] = set()  # of these, those that no replica has served since

    def changed(self, now: Collection[str]) -> None:
        """These names are served `now`."""
        self._now = now
        self._gone.difference_update(now)
        reported = {id: frozenset(backend.replica.models) for id, backend in self._backends.items()}
        before = {id: names for id, names in self._served.items() if id in self._replicas}
        self._served = before | {id: names or self.served_by(id) for id, names in reported.items()}

    def served_by(self, replica: str) -> frozenset[str]:
        """Return the names that it reported last, also while it is away."""
        return self._served.get(replica, frozenset())

    # --- pods that went

    def expect_back(self, replicas: Iterable[Replica]) -> None:
        """The pods of these replicas go, and most likely others come in their place."""
        now = monotonic()
        names = {name for one in replicas for name in (*self._reported_names(one), one.required_model) if name}
        before = [(name, at) for name, at in self._pod_went.items() if name not in names]
        self._pod_went = dict([*before, *((name, now) for name in names)][-MOST_NAMES:])
        self._gone = (self._gone | names) & {*self._pod_went}

    def expected_back(self) -> dict[str, float]:
        """Return the names whose pods are expected back, and how many seconds ago a pod of each went."""
        return {name: seconds for name, seconds in self._since_pod_went().items() if seconds < EXPECTED_SECONDS}

    def gone(self) -> list[str]:
        """Return the names that no replica has served since a pod of them went. A replica that is away, drained or on
        its way out serves no new request, so it does not count, and an operator's removal of it changes nothing."""
        return sorted(self._gone.difference(self._now))

    def _since_pod_went(self) -> dict[str, float]:
        now = monotonic()
        return {name: now - at for name, at in self._pod_went.items()}

    # --- a worker in another one's place

    def handed_on(self) -> dict[str, Any]:
        """Return what it goes on with: the names that each replica served last, and the arguments of `resume`."""
        return {
            "served": {id: sorted(names) for id, names in self._served.items() if names},
            "since_pod_went": {
                name: seconds
                for name, seconds in self._since_pod_went().items()
                if seconds < EXPECTED_SECONDS or name in self._gone
            },
            "gone": sorted(self._gone),
        }

    def resume(self, since_pod_went: Mapping[str, float], gone: Iterable[str]) -> None:
        """Take over what another process saw of pods that went, as `handed_on` returns it."""
        now = monotonic()
        self._pod_went = {name: now - seconds for name, seconds in since_pod_went.items()} | self._pod_went
        self._gone.update(name for name in gone if name in self._pod_went)

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

    def no_replica_error(self, model: str | None, tenant: Tenant | None) -> ApiError:
        """Return why nobody serves this model: it is not served here, no replica of it is ready, or one that is not
        ready may serve it. For a tenant it names no models but those that the tenant may use."""
        known = self._now
        if model is not None and known and model not in known and not self.is_away(model):
            untold = [_described(one) for one in self._replicas.values() if self._is_untold(one)]
            if unlisted := self.unlisted():
                untold.append(unlisted)
            named = known if tenant is None else [name for name in known if tenant.may_use(name)]
            return unknown_model_error(model, named, untold)
        states = [_described(one) for one in self._replicas.values() if self._may_serve(one, model)]
        if model is not None and self._is_expected_back(model):
            states.append(f"a pod of it went {monotonic() - self._pod_went[model]:.0f} s ago")
        what = f"no replica{'' if model is None else f' of {model[:200]!r}'} is ready"
        return ApiError(503, f"{what} ({'; '.join(states) or 'none is known'})", discreet=what)

    def _has_served(self, model: str) -> bool:
        """Whether a known replica reported this name last."""
        return any(model in names for id, names in self._served.items() if id in self._backends or id in self._replicas)

    def _is_expected_back(self, model: str) -> bool:
        return monotonic() - self._pod_went.get(model, -inf) < EXPECTED_SECONDS

    def _is_untold(self, replica: Replica) -> bool:
        """Whether it is expected to tell its models, and has not yet. What is no engine has none to tell."""
        return replica.state in UNTOLD and not replica.foreign and not self._reported_names(replica)

    def _reported_names(self, replica: Replica) -> Collection[str]:
        """The names that it has reported, now or before it went away."""
        return replica.models or self.served_by(replica.id)

    def _may_serve(self, replica: Replica, model: str | None) -> bool:
        """Whether it serves that model once it is ready, as far as is known."""
        return model is None or may_serve(model, self._reported_names(replica), replica.required_model)


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
