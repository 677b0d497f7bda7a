"""The weight-sync layer: versioned, sharded, verified weights from the trainer's ranks into the generators' parameters."""
