"""Prompts: where they come from, how they become tokens, and the tiny model and demonstrations of the quick start."""
