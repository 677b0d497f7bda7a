"""Weight sync: versioned, sharded and verified weights from the trainer's ranks into the generators' parameters."""
