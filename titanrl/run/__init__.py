"""A run: start, steps, evaluations, checkpoints, dumps, publications, restarts and end."""
