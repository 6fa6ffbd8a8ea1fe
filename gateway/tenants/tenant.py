"""One tenant: the name behind one or more API keys, and what it may use."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ApiError
from .limits import Limits


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the key file.

    When the file is read again, new objects are made; a running request keeps the one that it began with.
    """

    name: str
    qos_class: str | None = None  # the priority class of its requests; None: that of requests without a key
    models: frozenset[str] | None = None  # the served names it may use; None: all
    limits: Limits | None = None  # None: no limits
    cache_salt: str | None = None  # written into all its requests; None: requests keep their own salts

    def may_use(self, model: str | None) -> bool:
        return self.models is None or model in self.models

    def refusal(self, model: str | None) -> ApiError | None:
        """Return the error for a request for this model, or None if the tenant may use the model.

        If the tenant is restricted to some models, a request that names none is refused, since the engine would choose
        the model.
        """
        if self.may_use(model):
            return None
        which = f"may not use the model {model[:200]!r}" if model else "may use some models only, and none is named"
        message = f"this API key {which}; it may use: {', '.join(sorted(self.models))}"
        return ApiError(403, message, param="model", code="model_not_allowed")
