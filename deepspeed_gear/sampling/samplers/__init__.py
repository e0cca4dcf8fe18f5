"""The samplers: their interface (base) and kinds."""
