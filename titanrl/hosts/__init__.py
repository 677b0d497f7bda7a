"""Machines of a run: Slurm nodes, Kubernetes pods, a launcher's processes, and their check."""
