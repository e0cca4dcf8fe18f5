"""Packed batches of a replay: rollout batches, train steps, packs, forward passes over tables."""
