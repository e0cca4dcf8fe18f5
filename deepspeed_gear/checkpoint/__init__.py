"""Position and contents of a replay: save, load, reshard."""
