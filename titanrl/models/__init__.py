"""Model families: Hugging Face directories, built by torchtitan for both trainer and generator, and their checks."""
