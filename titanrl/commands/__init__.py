"""Subcommands of `titanrl` that are not training loops."""
