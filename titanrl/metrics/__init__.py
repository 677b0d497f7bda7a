"""Metrics of a run and their destinations: the run directory, the console, trackers and the report."""
