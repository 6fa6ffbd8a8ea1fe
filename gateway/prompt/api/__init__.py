"""Readers for the four OpenAI and Anthropic APIs that clients may use; all yield one form, `openai.Chat`."""
