"""One file per question, each writing JSON that says where it was measured. `python -m benchmarks.table` fills the docs."""
