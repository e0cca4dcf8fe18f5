"""The row exchange: which rows move between nodes, how they are encoded, and how they are sent."""
