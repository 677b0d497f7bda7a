"""Benchmarks, one module per question. Each writes JSON that names the machine; `benchmarks.table` copies it into the docs."""

import os

# Installed packages have bytecode. With this variable, a checkout has none, and each process compiles its modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
