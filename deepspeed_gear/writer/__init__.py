"""Writers: add trajectories to a store, from ranks and from actors without an engine."""
