"""The definition, in plain PyTorch, of each op that has several implementations: slow, readable,
and equal to them bit for bit.

Read it in this order: `select` (draws, epochs, tree, resolutions, achieved goals), `priorities`
(masses, weights, the least mass, updates; their powers in `integers`), `gather` (padding and packs
of the windows of `ops/windows.py`, converted by `ops/conversion.py`), `returns` (sums of rewards),
`ring_table` (a table in the memory of one device, and a step of every environment, added to it).
Tensors live on the CPU.

The messages between nodes (`encode_rows_`, `encode_draws_`, `encode_reports_` and their inverses)
and the packing plan (`plan_packs_`) have one implementation, in C++: round trips and invariants
test them.
"""
