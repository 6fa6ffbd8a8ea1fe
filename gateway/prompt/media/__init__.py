"""Prompts with media: what is known of the blocks that an engine makes of images, sound and video."""
