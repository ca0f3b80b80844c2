"""Outputs turn staged bytes into the value of a column in a batch: one class for each kind of value.

In: staged windows, the rows of a chunk. Out: values of each batch, in slots of the arena. Read `output`
first, then one of its kinds: `fixed`, `ragged`, or `decoded` with `images`, `media`, `objects`. `resolve`
makes them of `columns=` and `decode=`; `optional` says what a sample may lack.
"""
