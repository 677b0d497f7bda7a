"""Comparison with other programs. `__main__` is the benchmark; `trl_loop` and `plain_loop` run in the peers' environment."""
