"""Which of the ways a prompt with media is prepared in."""

from __future__ import annotations

from typing import Any

from ..api.conversation import Unroutable
from ..api.openai import Chat, may_cut
from ..prompt import Prompt
from ..render.renderer import Renderer
from ..tokens.tokenizer import Tokenizer
from . import partly
from .exactly import Engine, Images


class Media:
    """What is known of one model's media."""

    def __init__(self) -> None:
        self.images: Images | None = None  # of a model of which it is known how many tokens images have
        self.root = ""  # where all of its engines have the model from, as far as they tell

    def fill(
        self,
        prompt: Prompt,
        chat: Chat,
        request: dict[str, Any],
        renderer: Renderer,
        tokenizer: Tokenizer,
        seed: int,
        rule: str | None,
        context: int,
    ) -> None:
        """Give a prompt the blocks of a conversation with media, and say what is not known of them. `rule`: how its
        engines name images; `context`: tokens that a prompt may have. Raises what rendering raises."""
        if may_cut(request):
            raise Unroutable("truncation of a prompt with media")
        why = "family"
        if self.images is not None:
            why = self.images.fill(prompt, chat, request, renderer, tokenizer, seed, Engine(rule, self.root, context))
        if why != "exact":
            partly.fill(prompt, chat, renderer, tokenizer, seed, why)
