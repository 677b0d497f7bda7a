"""Rollout workers, which request completions from the generators, score them, and commit the groups to the buffer."""
