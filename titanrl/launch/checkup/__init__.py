"""Checks of the hosts of a run: `titanrl doctor --config FILE`."""
