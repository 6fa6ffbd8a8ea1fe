"""Readers of the OpenAI and Anthropic request bodies; each converts a conversation to one form, `openai.Chat`."""
