"""Prompts with images, sound or video: the KV cache blocks that engines make of them, as far as these are known."""
