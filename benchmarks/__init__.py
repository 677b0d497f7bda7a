"""One file per question; each writes JSON that says where it was measured. `python -m benchmarks.table` fills the README."""
