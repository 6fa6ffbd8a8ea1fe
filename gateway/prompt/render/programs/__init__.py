"""Model families whose conversations engines write by rules in their own code, not by a template; a file for each."""

from __future__ import annotations

from collections.abc import Iterable

from ..program import Program
from . import deepseek_v4, deepseek_v32, deepseek_v41, harmony

# The rules by the architecture that a model's config.json names.
_PROGRAMS = {
    "DeepseekV32ForCausalLM": deepseek_v32.PROGRAM,
    "DeepseekV4ForCausalLM": deepseek_v4.PROGRAM,
    "DeepseekV41ForCausalLM": deepseek_v41.PROGRAM,
    "GptOssForCausalLM": harmony.PROGRAM,
    "DeepseekV4ForConditionalGeneration": deepseek_v4.PROGRAM,
}


def program_for(architectures: Iterable[str]) -> Program | None:
    """Return the rules that write the conversations of a model of these architectures.

    Returns None if such a model has a chat template, or if its rules are not known.
    """
    return next((_PROGRAMS[one] for one in architectures if one in _PROGRAMS), None)
