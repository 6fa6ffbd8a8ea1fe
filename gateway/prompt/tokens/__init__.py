"""Text to token ids, as the model's tokenizer makes them, and known prefixes."""
