"""The plan of a replay: a config, its schemas, data and topology, resolved and agreed on by all
ranks.
"""
