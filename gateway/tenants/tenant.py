"""One tenant: the name behind one or more API keys, and what it may use."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ApiError
from .limits import Limits


@dataclass(frozen=True, slots=True)
class Tenant:
    """As the key file has it. A reload makes new objects; a request that is under way keeps the one it began with."""

    name: str
    qos_class: str | None = None  # the class of its requests; None: as for requests without a key
    models: frozenset[str] | None = None  # the served names it may use; None: all
    limits: Limits | None = None  # None: none at all
    cache_salt: str | None = None  # of all its requests; None: as they say themselves

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def refusal(self, model: str | None) -> ApiError | None:
        """Why a request for this model is refused. A request that names none is refused where models are restricted:
        what it would get is for an engine to say."""
        if self.models is None or model in self.models:
            return None
        which = f"may not use the model {model[:200]!r}" if model else "may use some models only, and none is named"
        return ApiError(
            403,
            f"this API key {which}; it may use: {', '.join(sorted(self.models))}",
            param="model",
            code="model_not_allowed",
        )
