"""Blocks of remote shards kept on this machine: each is fetched once, whoever asks.

In: blocks that are wanted, when they are next used. Out: their bytes, from a folder or the store.
Read `block_cache` first, then `folder` (crash-safe files) and `claims` (who fetches).
"""
