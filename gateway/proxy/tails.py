"""The cached part of the block after a prompt's cached full blocks, for engines whose hits may end within a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies import Placement

    from ..prompt import Prompt
    from .backend import Backend

TOKEN_BYTES = 4


def add_tail(placement: Placement, backend: Backend, prompt: Prompt) -> None:
    """Add the cached part of the next block to a placement's overlap, the prompt tokens predicted to be cached.

    The choice of the replica ignores this part, since it is less than a block.
    """
    if not backend.is_finer or backend.intake is None or not prompt.token_ids or prompt.several or placement.lower:
        return
    if not prompt.reads_cache:
        return
    held, tokens = placement.overlap // prompt.block_size, memoryview(prompt.token_ids)
    # The last token is always computed.
    found = tokens[: (prompt.tokens - 1) * TOKEN_BYTES]
    placement.overlap = backend.intake.reach(held, prompt.hashes, prompt.seed, found)
