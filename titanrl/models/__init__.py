"""Model families: read and validate Hugging Face model directories, and build their models with torchtitan.

Trainer and generator use the same definitions.
"""
