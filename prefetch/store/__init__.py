"""Reading ranges of remote and local shards into memory that is given.

In: shard, offset, memory. Out: the bytes are there, or an error that names shard and offset.
Read `reader` first, then `remote` and `fetching`; `retrier` tries again what `prefetch.retries` says is.
"""
