"""Scores of completions: built-in rewards, the judge, user-defined functions."""
