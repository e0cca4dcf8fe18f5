"""Rows that move between nodes: which, to where, and how."""
