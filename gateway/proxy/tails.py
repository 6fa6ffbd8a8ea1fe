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
    held, tokens = placement.overlap // prompt.block_size, memoryview(prompt.token_ids)
    # the last token is always computed
    found = tokens[: (prompt.tokens - 1) * TOKEN_BYTES]
    placement.overlap = backend.intake.reach(held, prompt.hashes, prompt.seed, found)
