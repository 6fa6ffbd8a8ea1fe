"""Loads of real text: each conversation asks about one document.

Lengths are given in tokens, but texts are cut by characters, at a fixed number of characters per token
(CHARS_PER_TOKEN). The generator has no tokenizer, as it works with any server. The report shows the lengths that the
server counted.
"""

from __future__ import annotations

import random

from loadgen.workload.conversations import Conversation, Turn
from loadgen.workload.documents import Document

CHARS_PER_TOKEN = 4

# The system prompt and the questions are as long and varied as those of a support assistant.
_GUIDE = (
    "You are a patient guide to the text below. Answer from the text alone. Quote names exactly as they are "
    "written there. When the text does not hold the answer, say so plainly and name the section that comes "
    "nearest. Prefer short sentences, one example where an example helps, and no filler. If a question rests on "
    "a misunderstanding, clear that up first. Never invent a parameter, a default or an exception."
)
_QUESTIONS = (
    "What is {topic} for, and when would I reach for it?",
    "Explain {topic} to somebody who has never used it.",
    "Show the smallest useful example of {topic}.",
    "Which mistakes do people make with {topic}?",
    "What happens at the edges: empty input, wrong types, errors, for {topic}?",
    "How does {topic} differ from {other}?",
    "Would you use {topic} or {other} for a long-running service, and why?",
    "Summarise what the text says about {topic} in three sentences.",
)


def multi_turn(
    documents: list[Document], requests: int, turns: int, think: float, output_tokens: int, rng: random.Random
) -> list[Conversation]:
    """Return conversations about one document each, with `requests` turns in all; documents are used equally often.

    The number of turns is drawn from half to one and a half times `turns`, the length of a reply from half to one and a
    half times `output_tokens`. The seconds between a reply and the next turn are exponential with mean `think`.
    """
    order: list[int] = []
    conversations, left = [], requests
    while left > 0:
        if not order:
            order = rng.sample(range(len(documents)), len(documents))
        index = order.pop()
        document, topics = documents[index], documents[index].topics
        length = min(left, rng.randint(max(1, turns // 2), turns + turns // 2))
        left -= length
        asked = [
            Turn(
                [
                    {
                        "role": "user",
                        "content": rng.choice(_QUESTIONS).format(topic=rng.choice(topics), other=rng.choice(topics)),
                    }
                ],
                max(1, rng.randint(output_tokens // 2, output_tokens * 3 // 2)),
                think=rng.expovariate(1 / think) if think else 0.0,
            )
            for _ in range(length)
        ]
        system = f"{_GUIDE}\n\n[Text {index + 1}: {document.title}]\n\n{document.text}"
        asked[0].messages.insert(0, {"role": "system", "content": system})
        conversations.append(Conversation(f"{document.title}-{len(conversations)}", asked))
    return conversations
