"""Catalogs: which blocks of which shards there are, and what lies in them.

In: URLs, or patterns of them. Out: a `Catalog`, made by reading every shard's index once, kept in a file.
Read `build` first, then `table` (the value) and `file` (how it is kept and checked).
"""
