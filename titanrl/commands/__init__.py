"""The command `titanrl`, and its subcommands that are not training loops."""
