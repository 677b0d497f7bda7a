"""Policy models: torchtitan's Qwen3, built from a Hugging Face directory for both trainer and generator."""
