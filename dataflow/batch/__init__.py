"""From columns to tensors: the batches of a chunk are gathered, decoded, transformed and split.

In: staged windows, the rows of some batches. Out: batches in slots of the arena.
Read `chunk` first, then `build` (one method for each kind of column); `packed` lays pieces into rows.
"""
