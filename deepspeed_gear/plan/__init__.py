"""The plan of a replay: config, schemas, data and topology, resolved, the same on all ranks."""
