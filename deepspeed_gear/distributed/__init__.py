"""Where a rank sits, and what ranks do together."""
