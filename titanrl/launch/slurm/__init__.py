"""Hosts of a Slurm allocation."""
