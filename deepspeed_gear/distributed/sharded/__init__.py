"""Selection over nodes that hold shards of one table."""
