"""Data sets on disk: reading, writing, splits, parts and statistics."""
