"""Plans: which positions of an order each batch of a rank takes.

In: an order, batch size, rank, world size, tail rule. Out: an `EpochPlan`: arithmetic on a few integers.
Read `batch_plan` (the arithmetic) first, then `plan`; `batch_index` is where batches' rows lie, `placement`
counts which rank reads what, `next_use` tells when, `window_size` and `split` choose sizes and parts.
`history` is which epochs the steps of a run were in.
"""
