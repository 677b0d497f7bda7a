"""The experience buffer: slots that bound staleness, records of finished groups, and the shards that hold their tokens."""
