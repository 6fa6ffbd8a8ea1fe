"""Text to token ids, as the model's tokenizer makes them, and the prefixes that are known already."""
