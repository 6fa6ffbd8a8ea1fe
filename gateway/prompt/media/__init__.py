"""Prompts with media: the blocks that engines make of images, sound and video, as far as they are known."""
