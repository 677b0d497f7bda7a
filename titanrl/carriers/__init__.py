"""Data that moves between processes: prompts, completions, groups, rows, tables, dumps."""
