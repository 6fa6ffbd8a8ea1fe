"""Whether the engines' caches already held what a run asked, so that its figures are better than on a cold start."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from loadgen.drive.records import Load
from loadgen.report.shares import percent
from loadgen.report.summary import Report
from loadgen.workload.conversations import Conversation, is_text

_LETTERS = 64  # of a prompt's first text: about a block of 16 tokens
NOTICED = 0.1  # share of the prompt tokens; a chat template's own first words are less


def beginning(conversation: Conversation) -> Hashable:
    """What a conversation's prompts begin with: engines share nothing between prompts that differ here."""
    if tools := conversation.extra.get("tools"):
        return str(tools)[: 4 * _LETTERS]  # templates put them first
    content = conversation.turns[0].messages[0].get("content")
    return tuple(content[0].ids[:1]) if isinstance(content, tuple) and content else str(content)[:_LETTERS]


def warm(run: Load) -> dict[str, object] | None:
    """Of the requests whose beginning nobody had sent before in this run: how many there are, their prompt tokens, and
    how many of these an engine had cached all the same; `is_text`: another seed asks the same. None where engines do
    not report it."""
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
    """What a reader must know of it."""
    found = report.get("warm_caches")
    if found and found["cached_tokens"] > NOTICED * found["prompt_tokens"]:
        prompts = (
            f"of {found['requests']:,.0f} prompts that begin like none before them"
            if found["requests"] > 1
            else "of the one prompt that begins like none before it"
        )
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
