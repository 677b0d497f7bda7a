"""Prompt streams, tokenizers, and the tiny model and demonstrations of the quick start."""
