"""Prompt streams, SFT examples, tokenizers, curricula and task mixtures."""
