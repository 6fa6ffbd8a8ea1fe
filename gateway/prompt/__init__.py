"""Turns request bodies into token ids and block hashes; knows nothing of the state of replicas."""

from .prompt import Prompt

__all__ = ["Prompt"]
