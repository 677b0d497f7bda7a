"""Confined processes with time limits, for running code that a model wrote."""
