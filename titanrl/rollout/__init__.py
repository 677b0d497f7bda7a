"""Rollouts: workers that ask the generator for completions, and the sandbox where verifiers score them."""
