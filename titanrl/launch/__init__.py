"""Launch a run: acquire hosts, spawn and connect processes and actors, supervise and replace them, and shut them down."""
