"""Benchmarks: one file per question, writing JSON that names the machine. `python -m benchmarks.table` fills the pages."""
