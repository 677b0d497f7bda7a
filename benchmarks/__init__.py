"""Benchmarks, one module per question. Each writes JSON that names the machine; `benchmarks.table` copies it into the docs."""
