"""Sizes as settings have them: bytes, which files and flags write as 512MiB."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from replicas.sizes import LIKE, MOST_BYTES, parse_size


def parse_bytes(value: Any) -> Any:
    """`64MiB`, `1.5 G`, `65536` -> bytes (int). Anything else is left to pydantic to refuse."""
    if isinstance(value, int) and value > MOST_BYTES:
        raise ValueError(f"{str(value)[:40]} is more than any machine has; write a size {LIKE}")
    return parse_size(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=MOST_BYTES)]
