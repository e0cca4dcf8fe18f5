"""Selection: integer masses, counter-based draws, and selections that every rank sees alike."""
