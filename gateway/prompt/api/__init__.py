"""What clients may send, brought to one form: chat, completions, responses and messages."""
