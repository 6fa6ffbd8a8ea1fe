"""One tenant: the name behind one or more API keys, and what it may use."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ApiError
from .limits import Limits


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the key file. Reading the file again makes new objects; a running request keeps its old one."""

    name: str
    qos_class: str | None = None  # the class of its requests; None: as for requests without a key
    models: frozenset[str] | None = None  # the served names it may use; None: all
    limits: Limits | None = None  # None: no limits
    cache_salt: str | None = None  # set in all its requests; None: their own is kept

    def may_use(self, model: str | None) -> bool:
        return self.models is None or model in self.models

    def refusal(self, model: str | None) -> ApiError | None:
        """Return the error for a request for this model, or None.

        If models are restricted, a request that names none is refused, as the engine would choose its model.
        """
        if self.may_use(model):
            return None
        which = f"may not use the model {model[:200]!r}" if model else "may use some models only, and none is named"
        message = f"this API key {which}; it may use: {', '.join(sorted(self.models))}"
        return ApiError(403, message, param="model", code="model_not_allowed")
