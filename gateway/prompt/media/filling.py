"""The choice between exact and partial blocks for a prompt with media."""

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
    """What is known of the media in one model's prompts."""

    def __init__(self) -> None:
        self.images: Images | None = None  # None where the number of an image's tokens is not known
        self.root = ""  # the path or name that all engines loaded the model from, or ""

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
        """Fill a prompt with the blocks of a conversation with media: all of them, or exact ones up to the first item.

        `seed`: the hash that the chain of block hashes starts from; `rule`: how the engines name images
        (`Engine.rule`); `context`: the most tokens of a prompt. Raises Unroutable, and what rendering raises.
        """
        if may_cut(request):
            raise Unroutable("truncation of a prompt with media")
        why = "family"
        if self.images is not None:
            why = self.images.fill(prompt, chat, request, renderer, tokenizer, seed, Engine(rule, self.root, context))
        if why != "exact":
            partly.fill(prompt, chat, renderer, tokenizer, seed, why)
