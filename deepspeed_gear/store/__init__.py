"""One node's share of the data: shared memory, tables, data sets."""
