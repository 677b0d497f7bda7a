"""Processes started by torchrun, srun, mpirun or a platform as hosts."""
