"""Detection of prefix caches that held a load's prompts before the run, which makes its figures too good."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from loadgen.drive.records import Load
from loadgen.report.shares import percent
from loadgen.report.summary import Report
from loadgen.workload.conversations import Conversation, is_text

_LETTERS = 64  # characters of a prompt's first text: about a block of 16 tokens
NOTICED = 0.1  # share of the prompt tokens; more than a chat template's own opening


def beginning(conversation: Conversation) -> Hashable:
    """Return a key of how a conversation's prompts begin; prompts with different keys share no blocks in engines."""
    if tools := conversation.extra.get("tools"):
        return str(tools)[: 4 * _LETTERS]  # templates put tools first
    content = conversation.turns[0].messages[0].get("content")
    return tuple(content[0].ids[:1]) if isinstance(content, tuple) and content else str(content)[:_LETTERS]


def warm(run: Load) -> dict[str, object] | None:
    """Return how warm the caches were, or None where engines do not report cached tokens.

    `requests`, `prompt_tokens`, `cached_tokens`: of the requests whose beginning had not been sent before in this run,
    so that nothing of them should have been cached. `is_text`: the prompts are the same under another seed.
    """
    begins = {conversation.id: beginning(conversation) for conversation in run.conversations}
    seen: set[Hashable] = set()
    requests = prompt = cached = 0
    for record in sorted(run.done, key=lambda record: record.sent):
        if record.turn or record.conversation not in begins or (begins[record.conversation] in seen):
            continue
        seen.add(begins[record.conversation])
        if record.error is None and record.prompt_tokens and record.cached_tokens is not None:
            requests, prompt, cached = requests + 1, prompt + record.prompt_tokens, cached + record.cached_tokens
    if not requests:
        return None
    text = is_text(run.conversations)
    return {"requests": requests, "prompt_tokens": prompt, "cached_tokens": cached, "is_text": text}


def notice(report: Report) -> Iterable[str]:
    """Yield a warning with a remedy if the caches were warm."""
    found = report.get("warm_caches")
    if found and found["cached_tokens"] > NOTICED * found["prompt_tokens"]:
        prompts = "of the one prompt that begins like none before it"
        if found["requests"] > 1:
            prompts = f"of {found['requests']:,.0f} prompts that begin like none before them"
        remedy = "take another --seed"
        if found["is_text"]:
            remedy = (
                """send --extra-body '{"cache_salt": "NAME"}' with another name in each run, by which caches are """
                "kept apart. Another --seed does not help: the texts stay the same"
            )
        yield (
            f"The caches were warm: {prompts} in this run, "
            f"{found['cached_tokens']:,.0f} of {found['prompt_tokens']:,.0f} tokens were cached "
            f"({percent(found['cached_tokens'] / found['prompt_tokens'], 0)}). On engines that have just started the "
            f"figures would be worse. Restart them, or {remedy}."
        )
