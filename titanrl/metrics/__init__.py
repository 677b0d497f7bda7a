"""What one sees of a run: phase times, the run directory's files, the console, trackers and the report."""
