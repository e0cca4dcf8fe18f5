"""Selection: integer masses, counter-based draws, and cuts that every rank sees alike."""
