"""List patterns and folders: the files that they mean.

In: what a user names. Out: the URLs of its shards. Read `claims` first, then `expand` and `shards`.
"""
