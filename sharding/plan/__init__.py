"""Plans: which positions of an order each batch of a rank takes.

In: an order, batch size, rank, world size, tail rule. Out: an `EpochPlan`: arithmetic on a few integers.
Read `plan` first; `placement` counts which rank reads what, `window_size` and `split` choose sizes and parts.
"""
