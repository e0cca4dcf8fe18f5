"""Processes around a replay: actors, policy weights, inference requests."""
