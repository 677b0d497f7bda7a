"""Generators: vLLM engines driven in-process, with weights that change in place."""
