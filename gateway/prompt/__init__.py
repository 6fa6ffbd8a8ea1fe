"""Request body to token ids to block hashes. Knows no replicas."""

from .prompt import Prompt

__all__ = ["Prompt"]
