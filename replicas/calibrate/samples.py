"""What a measured time is made of: how often each coefficient of the simulated engine's timing is in it.

The names are those of `replicas.simulated.profile` (`latency`, `work`, `token`, `text`, `text_token`, `busy_token`
of a request; the others of a step). A prompt of 4,096 new tokens in steps of 2,048, alone, is one `latency`, one
`work`, 4,096 `token`, two `base`, two `prefill`, 4,096 `prefill_token` and 4,096 * 2,048 `attention`.
"""

from dataclasses import dataclass, field

# The regions in which residuals are stated.
NEW, CACHED, TEXT, AMID, BURST, DECODE, BESIDE = (
    "new prompt", "prompt behind a cached prefix", "cached prompt as text", "cached text beside a decoding request", "burst of cached prompts",
    "decode step", "new prompt beside a decoding request",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    region: str
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    spread: float | None = None  # of a step, where many were seen: a standard deviation as a share


def prompt(region: str, seconds: float, tokens: int, cached: int, budget: int, text: bool = False) -> Sample:
    """Time to the first token of one request on an idle engine; `budget` is max_num_batched_tokens."""
    parts = _prefill(tokens - cached, cached, budget)
    parts |= {"latency": 1, "work": 1, "token": tokens, "base": parts["prefill"]}
    if text:
        parts |= {"text": 1, "text_token": tokens}
    return Sample(region, seconds, parts)


def burst(seconds: float, count: int, tokens: int, cached: int, budget: int) -> Sample:
    """From sending `count` cached prompts at once until the last has its first token.

    The last one's step begins when its way is done, or later by as much as the step before has to go: half of one."""
    parts = _prefill(tokens - cached, cached, budget)
    return Sample(
        BURST, seconds, parts | {"latency": 1, "work": count, "token": count * tokens, "base": 1.5, "prefill": 1.5}
    )


def amid(seconds: float, tokens: int, cached: int, context: float, budget: int) -> Sample:
    """Time to the first token of a prompt of text that comes, at any moment, while a request of `context` tokens
    decodes.

    It waits for what is left of the step that is under way, half of one, and the other has its token in its own
    step."""
    alone = prompt(AMID, seconds, tokens, cached, budget, text=True).parts
    other = {
        "base": alone["base"] + 0.5,
        "decode_sequence": alone["base"] + 0.5,
        "decode_context_token": (alone["base"] + 0.5) * context,
    }
    return Sample(AMID, seconds, alone | other | {"busy_token": tokens})


def decode(seconds: float, sequences: int, context: float, spread: float | None = None) -> Sample:
    """One step in which `sequences` requests with `context` tokens in all get a token each."""
    return Sample(DECODE, seconds, {"base": 1, "decode_sequence": sequences, "decode_context_token": context}, spread)


def beside(seconds: float, steps: int, context: float, tokens: int, cached: int, budget: int) -> Sample:
    """`steps` steps of one decoding request, with all of another's prompt in them."""
    parts = _prefill(tokens - cached, cached, budget - 1)
    decoding = {"base": steps, "decode_sequence": steps, "decode_context_token": steps * context}
    return Sample(BESIDE, seconds, parts | decoding)


def _prefill(new: int, before: int, budget: int) -> dict[str, float]:
    """However it is cut, each new token attends to all before it."""
    return {"prefill": -(-new // budget), "prefill_token": new, "attention": new * (before + new / 2)}
