"""Rendering: turns a conversation's messages into text by the model's chat template, and the text into tokens."""
