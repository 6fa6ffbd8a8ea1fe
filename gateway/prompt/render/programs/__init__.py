"""Model families whose conversations engines write by rules of their own, one file for each."""

from __future__ import annotations

from collections.abc import Iterable

from ..program import Program
from . import deepseek_v4, deepseek_v32, deepseek_v41, harmony

# By the architecture that a model's config.json names.
_PROGRAMS = {
    "DeepseekV32ForCausalLM": deepseek_v32.PROGRAM,
    "DeepseekV4ForCausalLM": deepseek_v4.PROGRAM,
    "DeepseekV41ForCausalLM": deepseek_v41.PROGRAM,
    "GptOssForCausalLM": harmony.PROGRAM,
    "DeepseekV4ForConditionalGeneration": deepseek_v4.PROGRAM,
}


def program_for(architectures: Iterable[str]) -> Program | None:
    """Return the rules for a model of these architectures, or None where it has a template or they are not known."""
    return next((_PROGRAMS[one] for one in architectures if one in _PROGRAMS), None)
