"""Who may get a request: the replicas that are known, what each serves, and how it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from policies import Router, Targets
from replicas import State

from ..errors import ApiError
from .backend import Backend

if TYPE_CHECKING:
    from replicas import Replica

    from ..models import Models
    from ..prompt import Prompt

TAKE_TRAFFIC = (State.READY, State.DEGRADED)  # the second only for want of the first


class Eligibility:
    """`replicas`: all that are known, for the words of a 503. `backends` are those that were ready once."""

    def __init__(self, models: Models, router: Router, replicas: Mapping[str, Replica]):
        self.models, self._router, self._replicas = models, router, replicas
        self.backends: dict[str, Backend] = {}
        self.names: dict[str, str | None] = {}  # every served name, with the base model of an adapter
        self.adapters: frozenset[str] = frozenset()
        self._served: dict[str, frozenset[str]] = {}  # by replica: the names it told last, also while it is away
        self._ready: dict[str | None, Targets] = {}
        self._with_room: dict[tuple[str | None, int], Targets] = {}  # of models whose replicas differ in context

    def changed(self) -> None:
        """Some replica's state, models or space changed: who may serve what is found anew."""
        self.models.refresh()
        self._ready.clear()
        self._with_room.clear()
        self.names = {name: parent for backend in self._taking(None) for name, parent in backend.replica.models.items()}
        self.adapters = frozenset(name for name, parent in self.names.items() if parent)
        told = {id: frozenset(backend.replica.models) for id, backend in self.backends.items()}
        self._served = {id: names or self._served.get(id, names) for id, names in told.items()}

    def targets(self, prompt: Prompt | None, tried: tuple[Backend, ...] = (), named: str | None = None) -> Targets:
        """Who may get it now. Raises ApiError when nobody can. `named`: the model of a request without prompt."""
        model = (prompt.model if prompt is not None else named) or None
        targets = self.ready_for(model)
        if not targets:
            raise self._nobody(model)
        if tried:
            targets = Targets([backend.candidate for backend in self.remaining(prompt, tried, named)])
            if not targets:
                raise ApiError(503, "no replica is left to try")
        elif prompt is not None and self.models.differ_in_context(model):
            targets = self._roomy(model, self._least_context(model, prompt))
        return targets

    def ready_for(self, model: str | None) -> Targets:
        """The ready replicas; degraded ones only if none is ready."""
        found = self._ready.get(model)
        if found is None:
            found = self._router.targets([backend.candidate for backend in self._taking(model)])
            if model is None or model in self.names:  # a client may ask for any name; those are not kept
                self._ready[model] = found
        return found

    def remaining(self, prompt: Prompt | None, tried: tuple[Backend, ...], named: str | None = None) -> list[Backend]:
        """Replicas that a request may go to next: ready ones, and degraded ones once all ready ones have failed it."""
        model = (prompt.model if prompt is not None else named) or None
        found = self._taking(model, tried)
        if prompt is not None and self.models.differ_in_context(model):
            least = self._least_context(model, prompt)
            found = [backend for backend in found if self.models.has_room(backend.id, least)]
        return found

    def is_unknown(self, model: str) -> bool:
        """Replicas are ready and have told their models, and this is none of them."""
        known = model in self.names or not (model and self.names) or self._is_away(model)
        return not known and not self._taking(model)

    def _is_away(self, model: str) -> bool:
        """Whether a replica that is not ready served it before."""
        return any(model in names for names in self._served.values())

    def _taking(self, model: str | None, tried: tuple[Backend, ...] = ()) -> list[Backend]:
        for state in TAKE_TRAFFIC:
            found = [
                b for b in self.backends.values() if b.replica.state is state and b not in tried and b.serves(model)
            ]
            if found:
                return found
        return []

    def _least_context(self, model: str | None, prompt: Prompt) -> int:
        """Whom a prompt may be sent to, where the model's replicas differ in the length of their context: those that
        have room for it and its answer, else those that have room for the prompt, which refuse its answer in their own
        words. Which of them are ready does not matter here: a replica that is too small refuses for good what another
        would answer later."""
        contexts = self.models.contexts.get(model) or self.models.contexts[None]
        wanted = prompt.tokens + (prompt.max_tokens or 1)
        return next((one for one in contexts if one >= wanted), contexts[-1])

    def _roomy(self, model: str | None, least: int) -> Targets:
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

    def _nobody(self, model: str | None) -> ApiError:
        known = self.names
        if model is not None and known and model not in known and not self._is_away(model):
            return ApiError(
                404,
                f"the model {model[:200]!r} does not exist; served here: {', '.join(sorted(known))}",
                param="model",
                code="model_not_found",
            )
        states = "; ".join(f"{one.id} is {one.state}: {one.reason}" for one in self._replicas.values())
        return ApiError(503, f"no replica is ready ({states or 'none is known'})")
