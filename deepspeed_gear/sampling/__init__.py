"""Selection: integer masses, counter-based draws, and selections that are equal on every rank."""
