"""Tokenizing: turns text into the token ids that the model's engines make, and caches those of prompts seen before."""
