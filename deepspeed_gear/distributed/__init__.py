"""Where a rank sits, and how ranks agree."""
