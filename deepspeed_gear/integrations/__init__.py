"""Adapters for the frameworks that people keep."""
