"""Generators: in-process vLLM engines whose weights are updated in place."""
