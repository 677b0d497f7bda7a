"""Replay buffer: slots that bound staleness, records of finished groups, and storage shards that hold their tokens."""
