"""Pure functions that compute the answer of `/readyz`, for the gateway and for each model, from its status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replicas.lifecycle import TAKES_TRAFFIC
from replicas.served import may_serve


def readiness(status: Mapping[str, Any], asked: Sequence[str]) -> dict[str, Any]:
    """Return whether the gateway is ready to serve the models in `asked`, and if not, why.

    `status`: the gateway's status, as GET /status shows it. `asked`: the names of models. If there are none, the
    gateway is ready as soon as it can serve any model. The result also has the readiness of each single model.
    """
    names = asked or _known(status)
    reasons = {name: _why_not(status, name) for name in names}
    models = {name: reason is None for name, reason in reasons.items()}
    why_not = next(filter(None, reasons.values()), None) if asked else status["why_not"]
    return {"ready": why_not is None, "why_not": why_not, "models": models}


def _of(status: Mapping[str, Any], model: str) -> list[Mapping[str, Any]]:
    """Return the entries, in the gateway's status, of all replicas that may serve this model, ready or not."""
    return [one for one in status["replicas"] if _may_serve(one, model)]


def _may_serve(replica: Mapping[str, Any], model: str) -> bool:
    """Return whether the replica may serve the model.

    A replica that takes requests but reports no models may serve any.
    """
    told = replica["served_models"]
    return may_serve(model, told, replica["required_model"]) or (not told and _takes_requests(replica))


def _known(status: Mapping[str, Any]) -> list[str]:
    named = {one["required_model"] for one in status["replicas"] if one["required_model"]}
    return sorted(named.union(status["expected_back"], *(one["served_models"] for one in status["replicas"])))


def _takes_requests(replica: Mapping[str, Any]) -> bool:
    return replica["state"] in TAKES_TRAFFIC


def _why_not(status: Mapping[str, Any], model: str) -> str | None:
    """Return why requests for this model cannot be served now, or None. Problems of other models are ignored."""
    if status["stopping"]:
        return str(status["why_not"])
    if any(map(_takes_requests, _of(status, model))):
        return f"waiting for the tokenizer of {model!r}, which is being loaded" if model in status["loading"] else None
    states = [f"{one['id']} is {one['state']} ({one['reason']})" for one in _of(status, model)]
    if model in status["expected_back"]:
        states.append(f"a pod of it went {status['expected_back'][model]:.0f} s ago")
    if states:
        return f"no replica of {model!r} is ready: {'; '.join(states)}"
    if not status["replicas"]:
        return str(status["why_not"])
    return f"no replica is known to serve {model!r}; known are: {', '.join(_known(status)) or 'none'}"
