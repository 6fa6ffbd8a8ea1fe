"""The replicas that may get a request: by its model, and by their state, role and context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from policies import Router, Targets
from replicas import TAKES_TRAFFIC, State
from replicas.roles import PREFILL

from ...errors import ApiError
from ..backend import Backend
from ..disagg.sides import Roles, Sides
from .known_models import KnownModels
from .pulling import Pulls

if TYPE_CHECKING:
    from replicas import Replica

    from ...models import Models
    from ...prompt import Prompt
    from ...tenants.tenant import Tenant


class Eligibility:
    """The registry of replicas that answers which ones may get a request, and caches the results by model."""

    def __init__(self, models: Models, router: Router, replicas: Mapping[str, Replica]):
        """Create the registry, in which no replica is ready yet.

        `replicas`: all known replicas by id; `backends` of the registry are those that have been ready once.
        """
        self.models, self._router, self._replicas = models, router, replicas
        self.backends: dict[str, Backend] = {}
        self.known = KnownModels(self.backends, replicas)
        self.names: dict[str, str | None] = {}  # served name -> base model of an adapter, None for a base model
        self.adapters: frozenset[str] = frozenset()
        self._ready: dict[str | None, Targets] = {}
        self.usual: dict[
            str | None, Targets
        ] = {}  # by model: what `targets` returns for any of its prompts, where that was found out
        self._with_room: dict[tuple[str | None, int], Targets] = {}  # by model and least context
        self.roles = Roles()
        self.pulls: Pulls | None = None  # is notified when replicas change
        self._sides: dict[str | None, Sides] = {}
        self._slow: dict[str | None, Targets] = {}
        self.spills = False  # whether some replica is of a slow pool, used only if all others are full or away
        self.finer = False  # whether some replica's cache hits may end inside a block, which needs a prompt's token ids
        self.full_until = 0.0  # until when some replica is marked as full, in monotonic seconds
        self._without_full: dict[Targets, Targets] = {}  # targets in `_ready` and `_with_room` -> those not full
        self._stays_full_until = 0.0  # until when `_without_full` is valid, in monotonic seconds

    def changed(self) -> None:
        """Clear the cached results and update the names of models, after some replica has changed.

        Called when a replica comes or goes, or when its state, models or prompt format have changed.
        """
        self.models.refresh()
        self._ready.clear()
        self.usual.clear()
        self._with_room.clear()
        self._sides.clear()
        self._slow.clear()
        known = [*self.backends.values()]
        self.full_until = max((one.full_until for one in known), default=0.0)
        self._stays_full_until = 0.0
        self.roles.look(known, {one.role for id, one in self._replicas.items() if id not in self.backends})
        if self.pulls is not None:
            self.pulls.changed()
        self.spills = any(one.replica.spill for one in known)
        self.finer = any(one.is_finer for one in known)
        # A name may be a base model on one replica and an adapter on another. The replica in the best state wins, since
        # its names come last.
        taking = [one.replica for state in reversed(TAKES_TRAFFIC) for one in known if one.replica.state is state]
        self.names = {name: parent for one in taking for name, parent in one.models.items()}
        self.adapters = frozenset(name for name, parent in self.names.items() if parent)
        self.known.changed(self.names)

    def targets(
        self,
        prompt: Prompt | None,
        tried: tuple[Backend, ...] = (),
        named: str | None = None,
        tenant: Tenant | None = None,
        able: Sequence[Backend] = (),
    ) -> Targets:
        """Return the replicas that may get a request now, as candidates of the policy; raises ApiError without any.

        `prompt`: the request's prompt, or None.
        `tried`, `able`: replicas that have failed the request, as for `remaining`.
        `named`: the model that a request without a prompt names.
        `tenant`: the tenant that sent it; the error names only models that the tenant may use.
        """
        model = (prompt.model if prompt is not None else named) or None
        targets = self.ready_for(model)
        if not targets:
            raise self.known.no_replica_error(model, tenant)
        if tried:
            targets = Targets([backend.candidate for backend in self.remaining(prompt, tried, named, able)])
            if not targets:
                raise ApiError(503, "no replica is left to try")
        elif prompt is not None and self.models.routes.differ_in_context(model):
            targets = self._roomy(model, self._least_context(model, prompt))
        elif prompt is not None and model in self._ready:
            self.usual[model] = targets
        return targets

    def ready_for(self, model: str | None) -> Targets:
        """Return the ready replicas of a model; degraded ones only if none is ready."""
        found = self._ready.get(model)
        if found is None:
            found = self._router.targets([backend.candidate for backend in self._taking(model)])
            if model is None or model in self.names:  # other names, which a client may invent, are not cached
                self._ready[model] = found
        return found

    def remaining(
        self,
        prompt: Prompt | None,
        tried: Sequence[Backend],
        named: str | None = None,
        able: Sequence[Backend] = (),
    ) -> list[Backend]:
        """Return the replicas on which a request may be retried; none if all have failed it.

        Degraded replicas are returned only if all ready ones have failed the request. Replicas that are other
        data-parallel ranks of an engine that failed it are returned only if every other engine has failed it as well,
        since it is mostly the whole engine process that fails.

        `tried`: the replicas that have failed the request.
        `named`: the model that a request without a prompt names.
        `able`: those of them that are tried again if no other is left.
        """
        model = (prompt.model if prompt is not None else named) or None
        found = self._taking(model, tried)
        failed = {one.replica.engine for one in tried}
        found = [one for one in found if one.replica.engine not in failed] or found
        if prompt is not None and self.models.routes.differ_in_context(model):
            least = self._least_context(model, prompt)
            found = [backend for backend in found if self.models.has_room(backend.id, least)]
        if not found and able:
            return self.remaining(prompt, [one for one in tried if one not in able], named)
        return found

    def when_full(self, backend: Backend, until: float) -> None:
        """Mark a replica that refused a request as full: it is tried last until this time, in monotonic seconds."""
        backend.full_until = max(backend.full_until, until)
        self.full_until = max(self.full_until, until)
        self._stays_full_until = 0.0

    def not_full(self, backends: list[Backend], now: float) -> list[Backend]:
        """Return the backends that are not marked as full now, or all of them if all are."""
        if now >= self.full_until:
            return backends
        return [one for one in backends if now >= one.full_until] or backends

    def but_full(self, targets: Targets, now: float) -> Targets:
        """Return the targets that are not marked as full now, or all of them if all are.

        The result is cached for as long as the same replicas are full, because building its arrays takes 1.2 ms for 256
        replicas.
        """
        if now >= self._stays_full_until:
            self._without_full.clear()
            full = [one.full_until for one in self.backends.values() if one.full_until > now]
            self._stays_full_until = min(full, default=self.full_until)
        found = self._without_full.get(targets)
        if found is None:
            left = self.not_full([self.backends[one.replica] for one in targets.candidates], now)
            found = targets
            if len(left) < len(targets):
                found = self._router.targets([one.candidate for one in left])
            if targets in self._ready.values() or targets in self._with_room.values():
                self._without_full[targets] = found
        return found

    def is_unknown(self, model: str) -> bool:
        """Return whether a model is unknown: no replica serves it now, and none is expected to serve it again.

        While no replica has reported its models, no model is unknown.
        """
        known = model in self.names or not (model and self.names) or self.known.is_away(model)
        return not known and not self._taking(model)

    def _taking(self, model: str | None, tried: Sequence[Backend] = ()) -> list[Backend]:
        """Return the replicas of a model that accept whole requests (in one leg).

        All of them are in the same state, the best one that any of these replicas is in. Replicas of slow pools, and
        replicas that only prefill, are returned only if there are no others.

        `tried`: replicas that are left out.
        """
        left = [one for one in self.backends.values() if one not in tried and one.serves(model)]
        if self.spills and _in_best_state(quick := [one for one in left if not one.replica.spill]):
            left = quick
        decoders = [one for one in left if one.replica.role != PREFILL] if self.roles.any else left
        return _in_best_state(decoders) or _in_best_state(left)

    def slow_pool(self, prompt: Prompt | None) -> Targets | None:
        """Return the ready replicas of slow pools that can serve a prompt; None if there are none.

        They are used when all other replicas are full.
        """
        if not self.spills or prompt is None:
            return None
        model = prompt.model or None
        found = self._slow.get(model)
        if found is None:
            slow = [one for one in self.backends.values() if one.replica.spill and one.serves(model)]
            ready = [one for one in slow if one.replica.state is State.READY and one.replica.role != PREFILL]
            found = Targets([one.candidate for one in ready])
            if model is None or model in self.names:
                self._slow[model] = found
        if self.models.routes.differ_in_context(model):
            found = Targets([one for one in found.candidates if self.has_room(self.backends[one.replica], prompt)])
        return found or None

    def sides(self, model: str | None) -> Sides | None:
        """Return a model's ready prefillers and decoders; None if all ready replicas have both roles."""
        found = self._sides.get(model)
        if found is None:
            ready = [one for one in self.backends.values() if one.replica.state is State.READY and one.serves(model)]
            found = Sides([one for one in ready if not one.replica.spill])
            if model is None or model in self.names:
                self._sides[model] = found
        return found if found.any else None

    def has_room(self, backend: Backend, prompt: Prompt) -> bool:
        """Return whether a prompt and its answer fit the replica's context length; True if that is unknown.

        If the answer's length is unknown, one token is assumed.
        """
        return self.models.has_room(backend.id, prompt.tokens + (prompt.max_tokens or 1))

    def _least_context(self, model: str | None, prompt: Prompt) -> int:
        """Return the context length, in tokens, that a replica needs to get this prompt.

        This is the shortest context with room for the prompt and its answer. If none has room, it is the longest, whose
        replicas then refuse the request with a message of their own. Contexts of replicas that are not ready count as
        well. Otherwise a replica with a short context might refuse for good a request that another replica could answer
        later.
        """
        contexts = self.models.routes.contexts.get(model) or self.models.routes.contexts[None]
        wanted = prompt.tokens + (prompt.max_tokens or 1)
        return next((one for one in contexts if one >= wanted), contexts[-1])

    def _roomy(self, model: str | None, least: int) -> Targets:
        """Return the replicas with a context of at least `least` tokens; raises ApiError if none of them is ready."""
        found = self._with_room.get((model, least))
        if found is None:
            found = self._router.targets(
                [one.candidate for one in self._taking(model) if self.models.has_room(one.id, least)]
            )
            if not found:
                raise ApiError(
                    503,
                    f"the prompt has room only in replicas with a context of {least} tokens, and none of them is ready",
                )
            if model is None or model in self.names:
                self._with_room[model, least] = found
        return found


def _in_best_state(backends: list[Backend]) -> list[Backend]:
    """Return the replicas that are ready; if there are none, those in the next best state that gets requests."""
    for state in TAKES_TRAFFIC:
        if found := [one for one in backends if one.replica.state is state]:
            return found
    return []
