"""Launch a run: check it, acquire hosts, spawn and connect processes and actors, supervise and replace them, shut them down."""
