"""What is held of the block behind the last whole one, at engines that find parts of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies import Placement

    from ..prompt import Prompt
    from .backend import Backend

TOKEN_BYTES = 4


def add_tail(placement: Placement, backend: Backend, prompt: Prompt) -> None:
    """Count it as held too. The choice is not made by it: it is at most a block, and the placement is made already."""
    if not backend.is_finer or backend.intake is None or not prompt.token_ids or prompt.several or placement.lower:
        return
    if not prompt.reads_cache:
        return
    size, held = prompt.block_size, placement.overlap // prompt.block_size
    end = min((held + 1) * size, prompt.tokens - 1)  # the last token is always computed
    before = prompt.hashes[held - 1] if held else prompt.seed
    tokens = prompt.token_ids[held * size * TOKEN_BYTES : end * TOKEN_BYTES]
    placement.overlap += backend.intake.tail(before, tokens)
