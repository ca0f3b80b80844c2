"""Conversion of datasets to shards: any source that is read, or any iterable, to tar, Parquet, MDS or tokens.

In: a source, a function, a target. Out: shards with their catalog, the same bytes however many workers write.
Read `run` first; `plan` says which samples are which shard's, `work` writes one.
"""
