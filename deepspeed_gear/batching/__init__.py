"""Batching: from resolutions to the tensors of a batch."""
