"""Hosts started by torchrun, srun, mpirun or a platform."""
