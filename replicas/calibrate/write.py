"""The profile's text: every figure with where it comes from."""

from collections.abc import Mapping

from .fit import Fit
from .learn import Known
from .plan import Limits

_REQUEST = {
    "latency": "ms of a request that no other waits for: HTTP, scheduling, the way back",
    "work": "ms of the API server, one request after the other",
    "token": "more of it for each prompt token",
    "text": "more of it when the prompt is text",
    "text_token": "and for each of its tokens",
    "busy_token": "and for each of its tokens while the engine is in its steps",
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


def profile(known: Known, limits: Limits, fit: Fit, facts: Mapping[str, str]) -> str:
    """YAML that `replicas.simulated.profile.load_profile` takes. `facts`: date, command and the like, one line each."""
    lines = [
        f"# {known.engine} {known.version} with {known.model} on {known.machine}, measured by `hitherto calibrate`."
    ]
    lines += [f"# {name}: {value}" for name, value in facts.items()]
    lines += ["#", "# Fit against what was measured, by kind of request: samples; bias (median of fit / measured - 1), typical",
              "# error (median), and the error that nine in ten stay below:"]  # fmt: skip
    for region, one in fit.residuals.items():
        lines.append(
            f"#   {region:38} {one.count:4}  {one.bias * 100:+6.1f} %  {one.typical * 100:5.1f} %  {one.worst_tenth * 100:5.1f} %"
        )
    for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        lines.append(f"{name}: {getattr(limits, name)}  # {limits.told[name]}")
    values = fit.ms | {"spread": fit.spread}
    for title, meanings in (("request", _REQUEST), ("step", _STEP)):
        lines.append(f"{title}:")
        for name, meaning in meanings.items():
            lines.append(
                f"  {name}: {_number(values[name])}  # {meaning}{'' if values[name] else '; too small to measure'}"
            )
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Four digits, in a way YAML takes for a number."""
    text = f"{value:.4g}"
    return text.replace("e", ".0e") if "e" in text and "." not in text else text
