"""Request bodies to token ids to block hashes; imports nothing of replicas."""

from .prompt import Prompt

__all__ = ["Prompt"]
