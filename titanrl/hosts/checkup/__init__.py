"""Check of the hosts that a run would use: `titanrl doctor --config FILE`."""
