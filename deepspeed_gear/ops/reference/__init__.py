"""The definition of every op, in plain PyTorch: slow, readable, and equal to the native ops bit for bit.

Read it in this order: `select` (draws, epochs, tree, resolutions, achieved goals), `priorities` (masses,
weights, the least mass, updates; their powers in `integers`), `gather` (windows, padding, packs), `packing`
(which trajectory goes into which pack), `convert` (dtypes), `returns` (sums of rewards), `encode_rows` (rows
between nodes), `sharded_draws` (draws and priorities between nodes), `ring_table` (a table in the memory of
one device, and a step of every environment, added to it).
Tensors live on the CPU.
"""
