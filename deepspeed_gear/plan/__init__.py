"""The plan of a replay: everything that follows from its config, data and topology."""
