"""Rendering: a conversation's messages to text, by the model's chat template."""
