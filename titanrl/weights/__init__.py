"""Weight sync: transfer versioned, sharded and verified weights from the trainer's ranks to the generators' parameters."""
