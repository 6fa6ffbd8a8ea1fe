"""The text of a profile, with the source of every figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .fit import Fit
from .learn import Known
from .plan import Limits

_REQUEST = {
    "latency": "ms of a request that no other waits for: HTTP, scheduling, the way back",
    "work": "ms of the API server, one request after the other",
    "token": "more of it for each prompt token",
    "text": "more of it when the prompt is text",
    "text_token": "and for each of its tokens",
}
_STEP = {
    "base": "ms of any step",
    "prefill": "more, with a prompt in it",
    "prefill_token": "for each new prompt token",
    "attention": "for each pair of a new token and one before it",
    "decode_sequence": "for each decoding request",
    "decode_context_token": "for each token of their contexts",
    "spread": "a share, not a time: a step's standard deviation",
}


def residuals(fit: Fit) -> Iterator[str]:
    """Yield the lines of a table of the fit's errors by kind of request.

    They are the median of fit / measured - 1, the median error, and the error that nine in ten stay below.
    """
    yield f"{'':38}{'samples':>8}{'bias':>11}{'typical':>11}{'90 %':>11}"
    for region, one in fit.residuals.items():
        figures = (
            f"{share * 100:{sign}9.1f} %" for share, sign in ((one.bias, "+"), (one.typical, ""), (one.worst_tenth, ""))
        )
        yield f"{region:38}{one.count:8}{''.join(figures)}"


def profile(known: Known, limits: Limits, fit: Fit, facts: Mapping[str, str]) -> str:
    """Return the profile as YAML for `replicas.simulated.profile.load_profile`.

    `facts`: lines for its header, such as date and command.
    """
    head = [f"{known.engine} {known.version} with {known.model} on {known.machine}, measured by `loadgen calibrate`."]
    head += [f"{name}: {value}" for name, value in facts.items()]
    head += ["", "Fit against what was measured, by kind of request: samples; bias (median of fit / measured - 1), typical",
             "error (median), and the error that nine in ten stay below:"]  # fmt: skip
    lines = [f"# {line}".rstrip() for line in (*head, *residuals(fit))]
    for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        lines.append(f"{name}: {getattr(limits, name)}  # {limits.told[name]}")
    values = fit.ms | {"spread": fit.spread}
    for title, meanings in (("request", _REQUEST), ("step", _STEP)):
        lines.append(f"{title}:")
        for name, meaning in meanings.items():
            small = "" if values[name] else "; too small to measure"
            lines.append(f"  {name}: {_number(values[name])}  # {meaning}{small}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Format a number with four digits, so that YAML reads it as a number."""
    text = f"{value:.4g}"
    return text.replace("e", ".0e") if "e" in text and "." not in text else text
