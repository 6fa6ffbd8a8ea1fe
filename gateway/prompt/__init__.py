"""Request body to token ids to block hashes. Knows no replicas."""
from .prompt import Prompt, PromptError

__all__ = ["Prompt", "PromptError"]
