"""Detect prefix caches that already held a load's prompts before the run, which makes its figures too good."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from loadgen.drive.records import Load, Record
from loadgen.report.shares import percent
from loadgen.report.summary import Report, cache_figures
from loadgen.workload.conversations import Conversation, is_text

_LETTERS = 64  # characters of a prompt's first text that are compared: about a KV block of 16 tokens
NOTICED = 0.1  # with a larger share of cached tokens caches were warm; a chat template's own opening is a smaller one


def beginning(conversation: Conversation) -> Hashable:
    """Return a key for how a conversation's prompts begin; prompts with different keys share no KV cache blocks."""
    if tools := conversation.extra.get("tools"):
        return str(tools)[: 4 * _LETTERS]  # templates put tools first
    content = conversation.turns[0].messages[0].get("content")
    return tuple(content[0].ids[:1]) if isinstance(content, tuple) and content else str(content)[:_LETTERS]


def warm(run: Load) -> dict[str, object] | None:
    """Return how many tokens were already cached of prompts that were new in this run.

    Only the first request with each beginning of a prompt counts, because none of its tokens should have been cached.
    The keys are `requests`, `prompt_tokens`, `cached_tokens` (as engines reported them) and `is_text`: whether the
    prompts stay the same under another seed. Returns None if no engine reports cached tokens.
    """
    begins = {conversation.id: beginning(conversation) for conversation in run.conversations}
    firsts: dict[Hashable, Record] = {}
    for record in sorted(run.done, key=lambda record: record.sent):
        if not record.turn and record.conversation in begins:
            firsts.setdefault(begins[record.conversation], record)
    found = cache_figures([record for record in firsts.values() if record.error is None and record.prompt_tokens])
    if not found["reported_on"]:
        return None
    prompt = found["prefill_tokens"] + found["cached_tokens"]
    told = {"requests": found["reported_on"], "prompt_tokens": prompt, "cached_tokens": found["cached_tokens"]}
    return {**told, "is_text": is_text(run.conversations)}


def notice(report: Report) -> Iterable[str]:
    """Yield a warning with a remedy if engines already had much of the prompts in their caches before the run."""
    found = report.get("warm_caches")
    if found and found["cached_tokens"] > NOTICED * found["prompt_tokens"]:
        cached, prompt, number = (found[key] for key in ("cached_tokens", "prompt_tokens", "requests"))
        prompts = "the one prompt that begins like none before it"
        if number > 1:
            prompts = f"{number:,.0f} prompts that begin like none before them"
        remedy = "take another --seed"
        if found["is_text"]:
            remedy = (
                """send --extra-body '{"cache_salt": "NAME"}' with another name in each run, by which caches are """
                "kept apart. Another --seed does not help: the texts stay the same"
            )
        of = f"{cached:,.0f} of {prompt:,.0f} tokens were cached ({percent(cached / prompt, 0)})"
        worse = "On engines that have just started the figures would be worse"
        yield f"The caches were warm: of {prompts} in this run, {of}. {worse}. Restart them, or {remedy}."
