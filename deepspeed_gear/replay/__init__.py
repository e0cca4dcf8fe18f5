"""Replay: the tables, streams and fields of a config, usable without an engine."""
