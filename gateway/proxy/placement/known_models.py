"""The registry of the models and adapters that replicas serve now or served before, and the errors for other models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from replicas import State
from replicas.served import may_serve

from ...errors import ApiError

if TYPE_CHECKING:
    from replicas import Replica

    from ...tenants.tenant import Tenant
    from ..backend import Backend

# The code of the 503 for a model that no replica is known to serve, while some have not reported theirs.
MODEL_NOT_KNOWN = "model_not_known"
EXPECTED_SECONDS = 600.0  # how long a removed pod's replacement is expected: it has to be scheduled and loaded first
MOST_NAMES = 4096  # how many names of removed pods' models are kept, the latest ones
TAKEN_OUT = (State.DRAINING, State.STOPPED)  # states of a replica that an operator, or its pod's removal, takes out
UNTOLD = (State.STARTING, State.WARMING, State.FAILED)  # states in which a replica may still report its models


class KnownModels:
    """The registry of models' and adapters' names that each replica has reported, with those of removed pods."""

    def __init__(self, backends: Mapping[str, Backend], replicas: Mapping[str, Replica]):
        """Create the registry, which knows no name yet.

        `replicas`: all known replicas by id.
        `backends`: those of them that have been ready once.
        """
        self._backends, self._replicas = backends, replicas
        self.unlisted: Callable[[], str] = lambda: ""  # why `replicas` may be incomplete; "" if it is not
        self._now: Collection[str] = ()  # the names that are served now
        self._served: dict[str, frozenset[str]] = {}  # replica -> the names that it reported last
        self._pod_went: dict[str, float] = {}  # name -> when its last pod was removed (monotonic), in order of time
        self._gone: set[str] = set()  # names of removed pods that no replica has served since

    def changed(self, now: Collection[str]) -> None:
        """Update the registry after replicas have changed. `now`: the names that are served now."""
        self._now = now
        self._gone.difference_update(now)
        reported = {id: frozenset(backend.replica.models) for id, backend in self._backends.items()}
        before = {id: names for id, names in self._served.items() if id in self._replicas}
        self._served = before | {id: names or self.served_by(id) for id, names in reported.items()}

    def served_by(self, replica: str) -> frozenset[str]:
        """Return the names that a replica reported last, even if it is not ready now."""
        return self._served.get(replica, frozenset())

    # --- removed pods

    def expect_back(self, replicas: Iterable[Replica]) -> None:
        """Note that the pods of these replicas are being removed, and that others will probably replace them."""
        now = monotonic()
        names = {name for one in replicas for name in (*self._reported_names(one), one.required_model) if name}
        before = [(name, at) for name, at in self._pod_went.items() if name not in names]
        self._pod_went = dict([*before, *((name, now) for name in names)][-MOST_NAMES:])
        self._gone = (self._gone | names) & {*self._pod_went}

    def expected_back(self) -> dict[str, float]:
        """Return the names for which a new pod is expected, each with the seconds since its last pod was removed."""
        return {name: seconds for name, seconds in self._since_pod_went().items() if seconds < EXPECTED_SECONDS}

    def gone(self) -> list[str]:
        """Return the names that no replica has served since a pod that served them was removed.

        A replica that failed, is drained or is shutting down gets no new requests, so it does not count as serving a
        name. If an operator removes a replica by hand, the result stays the same.
        """
        return sorted(self._gone.difference(self._now))

    def _since_pod_went(self) -> dict[str, float]:
        now = monotonic()
        return {name: now - at for name, at in self._pod_went.items()}

    # --- handover to another worker process

    def handed_on(self) -> dict[str, Any]:
        """Return the state for a new worker process.

        Its member "served" has the names of models by replica, for `served_before`. The other members are the arguments
        of `resume`.
        """
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
        """Take over what another process knew of removed pods.

        `since_pod_went`, `gone`: the members of these names in the result of its `handed_on`.
        """
        now = monotonic()
        self._pod_went = {name: now - seconds for name, seconds in since_pod_went.items()} | self._pod_went
        self._gone.update(name for name in gone if name in self._pod_went)

    def served_before(self, replica: str, names: Iterable[str]) -> None:
        """Record the names of the models that a replica served before this process began.

        They are ignored if this process has names of the replica already.
        """
        self._served.setdefault(replica, frozenset(names))

    # --- models that are not served now

    def is_away(self, model: str) -> bool:
        """Return whether a model is not served now, but may come back.

        It may come back in three cases:

        - A known replica has served it before. This includes drained replicas, since a drain is usually a step of an
          upgrade.
        - A replica is required to serve it. Drained and stopped replicas are left out here.
        - A pod that served it was removed in the last ten minutes.
        """
        return (
            any(model in names for id, names in self._served.items() if id in self._backends or id in self._replicas)
            or any(one.required_model == model and one.state not in TAKEN_OUT for one in self._replicas.values())
            or self._is_expected_back(model)
        )

    def no_replica_error(self, model: str | None, tenant: Tenant | None) -> ApiError:
        """Return the error for a model that is not served now; `model` None stands for any model.

        The error is a 404 if the model does not exist. It is a 503 if no replica of it is ready, or if replicas that
        have not reported their models may serve it. To a tenant it names only models that the tenant may use.
        """
        known = self._now or frozenset().union(*self._served.values())  # while all are away, what they served
        if model is not None and known and model not in known and not self.is_away(model):
            untold = [
                _described(one)
                for one in self._replicas.values()
                if one.state in UNTOLD and not one.foreign and not self._reported_names(one)
            ]
            if unlisted := self.unlisted():
                untold.append(unlisted)
            named = known if tenant is None else [name for name in known if tenant.may_use(name)]
            return unknown_model_error(model, named, untold)
        states = [_described(one) for one in self._replicas.values() if self._may_serve(one, model)]
        if model is not None and self._is_expected_back(model):
            states.append(f"a pod of it went {monotonic() - self._pod_went[model]:.0f} s ago")
        what = f"no replica{'' if model is None else f' of {model[:200]!r}'} is ready"
        return ApiError(503, f"{what} ({'; '.join(states) or 'none is known'})", discreet=what)

    def _is_expected_back(self, model: str) -> bool:
        return monotonic() - self._pod_went.get(model, -inf) < EXPECTED_SECONDS

    def _reported_names(self, replica: Replica) -> Collection[str]:
        """Return the names of models that a replica reports now, or reported last before it went away."""
        return replica.models or self.served_by(replica.id)

    def _may_serve(self, replica: Replica, model: str | None) -> bool:
        """Return whether a replica may serve the model once it is ready, by the names that are known of it."""
        return model is None or may_serve(model, self._reported_names(replica), replica.required_model)


def unknown_model_error(model: str, known: Collection[str], untold: Sequence[str]) -> ApiError:
    """Return the error for a model that no replica is known to serve.

    A 404 is final to clients, so the status is 503 while there are replicas that have not reported their models.

    `known`: names that are served, for the message.
    `untold`: descriptions of the replicas that have not reported their models.
    """
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
