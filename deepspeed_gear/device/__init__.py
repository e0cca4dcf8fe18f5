"""A table in a GPU's memory, private to a rank."""
