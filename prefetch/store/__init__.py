"""Reading ranges of remote and local shards into memory that is given.

In: shard, offset, memory. Out: the bytes are there, or an error that names shard and offset.
Read `reader` first; `direct` and `connections` are our own HTTP and S3, `retries` says what is tried again.
"""
