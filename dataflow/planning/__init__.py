"""The plan of a loader over shards, before anything is read: which samples come when, on this rank.

In: a dataset, `settings`, the lengths of samples where batches go by them. Out: the plan of an epoch.
Read `plan` first, then `length_aware` (lengths before the plan); `rank` is which rank this is.
"""
