"""A run: its lifecycle, evaluations, checkpoints, dumps, restarts and closing lines."""
