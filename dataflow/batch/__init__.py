"""From columns to tensors: the batches of a chunk are gathered, decoded, transformed and split.

In: staged windows, the rows of some batches. Out: batches in slots of the arena. Read `chunk` first, then
`output` (what a column becomes) and one of its kinds: `fixed`, `ragged`, `images`, `objects`; `resolve` makes
them of `columns=` and `decode=`; `packed` lays pieces into rows.
"""
