"""Trainers of other frameworks that train with this package. Each needs an extra of its name."""
