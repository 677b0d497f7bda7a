"""Checks before anything starts, and the table of extension points."""
