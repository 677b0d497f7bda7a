"""Slurm nodes as hosts."""
